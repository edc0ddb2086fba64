"""Which provider serves a tensor, and that choosing one at import time builds nothing."""

from __future__ import annotations

import pytest
import torch
from kernel_providers import make_native
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import ArgumentError
from lowtide.kernels import select


def test_native_serves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_native()
    for asked in ("", "native"):
        monkeypatch.setenv("LOWTIDE_KERNELS", asked)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert select(torch.zeros(1, 2, 3, dtype=dtype)).name == "native"


def test_tensor_calls_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "tensor")
    assert select(torch.zeros(1, 2, 3)).name == "tensor"


def test_unknown_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "cuda")
    with pytest.raises(ArgumentError, match="LOWTIDE_KERNELS: expected one of tensor, native, triton, got 'cuda'"):
        select(torch.zeros(1, 2, 3))


def test_tensors_without_memory_get_tensor_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_KERNELS", "")
    with FakeTensorMode():
        assert select(torch.zeros(1, 2, 3)).name == "tensor"
    assert select(torch.zeros(1, 2, 3, device="meta")).name == "tensor"
    view = torch.zeros(1, 2, 3, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    assert select(view).name == "tensor"
