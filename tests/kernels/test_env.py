"""`lowtide env` says which provider is used and why, as text and as JSON."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from kernel_providers import make_native

from lowtide.cli import run
from lowtide.cli.env import OPTIONAL
from lowtide.kernels import choice
from lowtide.kernels.build import BuildError


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


@pytest.mark.parametrize("asked", ["", "native"])
def test_why_native_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", asked)
    monkeypatch.setattr(choice, "_load_native", lambda: BuildError("missing: a C++ compiler"))
    kernels = report(capsys)["kernels"]
    assert kernels["native"] == "not available: missing: a C++ compiler"
    why = "LOWTIDE_KERNELS=native" if asked else "LOWTIDE_KERNELS is not set"
    assert kernels["used on cpu"] == f"tensor ({why}, but missing: a C++ compiler)"


def test_triton_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "triton")
    kernels = report(capsys)["kernels"]
    assert kernels["used on cpu"] == "tensor (LOWTIDE_KERNELS=triton, but they run on CUDA, not on cpu)"
    assert kernels["triton"] == (
        "available if asked for: CUDA; passes with a convolution or pool, and streaming: tensor calls"
    )
    if not torch.cuda.is_available():
        assert kernels["used on cuda"] == "nothing: no CUDA device here"


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "triton")
    monkeypatch.setattr(choice, "_load_triton", choice._load_triton.__wrapped__)
    monkeypatch.setitem(sys.modules, "lowtide.kernels.triton_passes", None)
    kernels = report(capsys)["kernels"]
    assert str(kernels["triton"]).endswith("(pip install triton)")
    assert str(kernels["used on cpu"]).startswith("tensor (LOWTIDE_KERNELS=triton, but ")


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
