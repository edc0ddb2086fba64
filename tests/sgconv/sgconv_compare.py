"""Comparisons that can fail: each first makes sure that zero and the negated answer would be rejected."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def assert_near(got: Tensor, want: Tensor, tolerance: float, what: str = "") -> None:
    """||got - want|| <= tolerance * ||want||, for a `want` that is not zero."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} against {tuple(want.shape)}"
    assert want.double().norm() > 0, f"{what}: nothing to compare with"
    assert tolerance < 0.01
    for wrong in (torch.zeros_like(want), -want, want * 1.01):
        assert relative_error(wrong, want) > tolerance
    error = relative_error(got, want)
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def assert_as_exact(ours: Tensor, plain: Tensor, oracle: Tensor, what: str = "") -> None:
    """error(ours) <= 2 error(plain) + 4 eps scale, against the oracle in float64."""
    scale = oracle.norm().item()
    assert scale > 0, f"{what}: nothing to compare with"
    allowed = 2 * (plain.double() - oracle).norm().item() + 4 * torch.finfo(plain.dtype).eps * scale
    for wrong in (torch.zeros_like(oracle), -oracle):
        assert (wrong - oracle).norm().item() > allowed, f"{what}: the check accepts anything"
    error = (ours.double() - oracle).norm().item()
    assert error <= allowed, f"{what}: error {error / scale:.2e} > allowed {allowed / scale:.2e}"


def gradients(y: Tensor, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients of a fixed random projection of y, the same numbers in every dtype."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(torch.autograd.grad(y, inputs, weights.to(y.dtype), materialize_grads=True))
