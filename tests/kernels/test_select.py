"""Which provider serves a tensor, and that choosing one at import time builds nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kernel_providers import make_native
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import ArgumentError
from lowtide.kernels import choice, choose, select
from lowtide.kernels.native import LEVELS


def test_native_serves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_native()
    for asked in ("", "native"):
        monkeypatch.setenv("LOWTIDE_KERNELS", asked)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert select(torch.zeros(1, 2, 3, dtype=dtype)).name == "native"


@pytest.mark.parametrize("level", LEVELS)
def test_torch_s_choice_of_instructions_is_ours(level: str) -> None:
    """ATEN_CPU_CAPABILITY is read once, by torch: so in a process of its own."""
    make_native(level)  # skips where the processor has no such instructions
    code = "import lowtide.kernels.native as n; print(n.NativeKernels().level)"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level.lower()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == f"{level}\n", done.stderr


def test_tensor_calls_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "tensor")
    assert select(torch.zeros(1, 2, 3)).name == "tensor"


def test_unknown_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "cuda")
    with pytest.raises(ArgumentError, match="LOWTIDE_KERNELS: expected one of tensor, native, triton, got 'cuda'"):
        select(torch.zeros(1, 2, 3))


@pytest.fixture
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_warned", set())


class Elsewhere(torch.Tensor):
    """A map that says it is on a GPU: none is needed to ask who would serve it."""

    device = torch.device("cuda")


def elsewhere() -> torch.Tensor:
    return torch.zeros(1, 2, 3).as_subclass(Elsewhere)


@pytest.mark.parametrize(
    ("asked", "x", "why"),
    [
        ("native", elsewhere(), "they run on the CPU, not on cuda"),
        ("native", torch.zeros(1, 2, 3, device="meta"), "they run on the CPU, not on meta"),
        ("native", torch.zeros(1, 2, 3, dtype=torch.complex64), "they take plain .* not Tensor of torch.complex64"),
        ("triton", torch.zeros(1, 2, 3), "they run on CUDA, not on cpu"),
        ("triton", elsewhere(), "they take plain .* not Elsewhere of torch.float32"),
    ],
)
@pytest.mark.usefixtures("not_warned")
def test_asked_for_and_not_able_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, asked: str, x: torch.Tensor, why: str
) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", asked)
    message = f"the {asked} kernels cannot be used, tensor calls take their place: {why}"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        assert [select(x).name for _ in range(3)] == ["tensor"] * 3
    assert len(warned) == 1


@pytest.mark.usefixtures("not_warned")
def test_traced_tensors_where_native_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "native")
    with FakeTensorMode(), pytest.warns(RuntimeWarning, match="not FakeTensor of torch.float32"):
        assert select(torch.zeros(1, 2, 3)).name == "tensor"


@pytest.mark.usefixtures("not_warned")
def test_unasked_other_devices_get_tensor_calls_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "")
    found = choose(elsewhere())
    assert (found.kernels.name, found.warning) == ("tensor", "")
    assert found.reason == "LOWTIDE_KERNELS is not set: Triton was never run on a GPU, so it has to be asked for"
    assert select(elsewhere()).name == "tensor"


@pytest.mark.usefixtures("not_warned")
def test_triton_whose_first_pass_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C compiler, or with a GPU that is too old, meets this on the first launch."""
    monkeypatch.setenv("LOWTIDE_KERNELS", "triton")
    triton_passes = pytest.importorskip("lowtide.kernels.triton_passes")

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore lines.")

    for launch, why in ((no_compiler, "RuntimeError: Failed to find C compiler."), (lambda *_, **__: None, "wrong")):
        provider = triton_passes.TritonKernels()
        provider.device_type = "cpu"
        monkeypatch.setattr(triton_passes, "_launch", launch)
        monkeypatch.setattr(choice, "_load_triton", lambda provider=provider: provider)
        with pytest.warns(RuntimeWarning, match=f"a first pass .*{why}"):
            assert select(torch.zeros(1, 2, 3)).name == "tensor"


def test_tensors_without_memory_get_tensor_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "")
    with FakeTensorMode():
        assert select(torch.zeros(1, 2, 3)).name == "tensor"
    assert select(torch.zeros(1, 2, 3, device="meta")).name == "tensor"
    view = torch.zeros(1, 2, 3, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    assert select(view).name == "tensor"
