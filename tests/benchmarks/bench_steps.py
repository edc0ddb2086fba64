"""Steps whose bytes are known."""

from __future__ import annotations

from collections.abc import Callable

import torch


def squares(numbers: int = 1 << 22) -> Callable[[], None]:
    """Keeps x * x and its square's root: two arrays of float32 for backward, at least."""
    x = torch.ones(numbers, requires_grad=True)

    def step() -> None:
        x.grad = None
        (x * x).sqrt().sum().backward()

    return step
