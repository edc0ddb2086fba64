"""`lowtide env` says which provider is used and why, as text and as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from kernel_providers import make_native

from lowtide.cli import run
from lowtide.cli.env import OPTIONAL


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert run(["env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_native_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOWTIDE_KERNELS", raising=False)
    kernels = report(capsys)["kernels"]
    assert kernels["native"] == f"available: CPU, {make_native().level} instructions"
    assert kernels["used on cpu"] == "native (LOWTIDE_KERNELS is not set: the fastest that can run)"


def test_request_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "tensor")
    found = report(capsys)
    assert found["kernels"]["used on cpu"] == "tensor (LOWTIDE_KERNELS=tensor)"
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"]["threads"] == torch.get_num_threads()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"versions", "devices", "kernels", "optional packages"} <= set(lines)
    assert any(line.split()[:2] == ["torch", torch.__version__] for line in lines)


def test_unknown_provider_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "fast")
    assert run(["env"]) == 2
    error = capsys.readouterr().err
    assert error == "error: LOWTIDE_KERNELS: expected one of tensor, native, triton, got 'fast'\n"


def test_missing_package_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPTIONAL, "no-such-package", "lowtide[plots]")
    monkeypatch.delenv("LOWTIDE_KERNELS", raising=False)
    assert report(capsys)["optional packages"]["no-such-package"] == "not installed (pip install 'lowtide[plots]')"
