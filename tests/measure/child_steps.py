"""Steps that the tests build in fresh processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.models import densenet_bc


def bc_100(batch: int) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    return densenet_bc(100, 12, recompute="none"), torch.randn(batch, 3, 32, 32)


def fft_convolution(channels: int, length: int) -> tuple[Any, ...]:
    """y = u * k along the last axis, transforms of twice the length, in ordinary autograd."""

    def convolve(u: Tensor, k: Tensor) -> Tensor:
        n = 2 * length
        spectrum = torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n)
        return torch.fft.irfft(spectrum, n=n)[..., :length]

    u, k = (torch.randn(channels, length, requires_grad=True) for _ in range(2))
    return convolve, u, k


def exponentials(numbers: int, times: int) -> Callable[[], None]:
    """Holds `times` tensors of float32 `numbers` at once; prints, which is nobody's output."""

    def step() -> None:
        print("a step")
        held = [torch.full((numbers,), float(i)) for i in range(times)]
        assert len(held) == times

    return step


def fails() -> None:
    raise RuntimeError("a fault of the step")


def killed() -> None:
    os.kill(os.getpid(), 9)


def sleeps() -> None:
    time.sleep(60)


def threads() -> Callable[[], None]:
    assert os.environ["OMP_NUM_THREADS"] == "1", "the variable that was asked for"
    assert torch.get_num_threads() == 1
    return lambda: None


NOT_CALLABLE = 3
