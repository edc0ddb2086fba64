"""What each pass must compute, in float64 and ordinary tensor calls, and the check that a provider computes it.

The bounds are those of the arithmetic, number by number: a few roundings of the operands' magnitudes, plus one
rounding to the map's own dtype. So one wrong number anywhere is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_providers import IN_INTERPRETER
from torch import Tensor

from lowtide.kernels import Kernels

Form = str  # "planes", "rows"
ROUNDINGS = 4


@dataclass(frozen=True)
class Shape:
    """N images, C channels, S positions; the map is a slice of a buffer with `around` more channels on both sides."""

    n: int
    c: int
    s: int
    around: int = 3


# tails of every vector width (4, 8, 16 floats, half as many doubles), single numbers, nothing; several pieces, blocks
SHAPES = [
    Shape(3, 5, 7),
    Shape(0, 3, 4),
    Shape(2, 4, 1),
    Shape(1, 1, 1, around=0),
    Shape(4, 12, 49),
    Shape(2, 39, 49),
    Shape(2, 7, 1023),
    Shape(1, 5, 2077),
    Shape(2, 342, 16, around=1),
    Shape(3, 24, 1370, around=6),
]
if IN_INTERPRETER:  # slow: nothing, one number, parts of a tile, several channel tiles, several stretches
    SHAPES = [SHAPES[i] for i in (0, 1, 3, 5, 7)]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def buffer(shape: Shape, form: Form, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A buffer of random numbers and the map that is a channel slice of it."""
    values = torch.randn(shape.n, shape.c + 2 * shape.around, shape.s, generator=generator, dtype=torch.float64).to(
        dtype
    )
    if form == "rows":
        values = values.transpose(1, 2).contiguous().transpose(1, 2)
    return values, values[:, shape.around : shape.around + shape.c]


def vector(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape.c, generator=generator, dtype=torch.float64).to(accumulation(dtype))


def wide(vector: Tensor) -> Tensor:
    return vector.double()[:, None]


def assert_within(ours: Tensor, oracle: Tensor, allowed: Tensor, what: str) -> None:
    """|ours - oracle| <= allowed, number by number; `allowed` must be tight enough to refuse plain wrong answers."""
    assert ours.shape == oracle.shape, f"{what}: shape {tuple(ours.shape)}, expected {tuple(oracle.shape)}"
    if oracle.numel() == 0:
        return
    if oracle.abs().max() > 0:
        for wrong, name in ((torch.zeros_like(oracle), "zeros"), (-oracle, "the negated"), (1.01 * oracle, "1 % more")):
            assert ((wrong - oracle).abs() > allowed).any(), f"{what}: the bound would accept {name}"
    error = (ours.double() - oracle).abs()
    bad = ~(error <= allowed)  # also where the error is NaN
    assert not bad.any(), (
        f"{what}: {int(bad.sum())} of {bad.numel()} numbers are off, the first at {bad.nonzero()[0].tolist()} by "
        f"{error[bad][0]:.2e} of {oracle[bad][0]:.2e}, allowed {allowed.expand_as(bad)[bad][0]:.2e}"
    )


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def map_bound(oracle: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding to the map's dtype and a few of the terms in the accumulation dtype."""
    return eps(dtype) * oracle.abs() + ROUNDINGS * eps(accumulation(dtype)) * magnitude + torch.finfo(dtype).tiny


def sum_bound(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocked sums: a few roundings of the sum of magnitudes, however many terms there are."""
    return ROUNDINGS * eps(accumulation(dtype)) * terms.abs().sum((0, 2)) + 1e-300


class Case:
    """Inputs for every pass of one shape, form and dtype.

    No |scale * x + shift| is so small that a rounding could flip the mask.
    """

    def __init__(self, shape: Shape, form: Form, dtype: torch.dtype, act: str = "relu", seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.form, self.dtype, self.act = shape, form, dtype, act
        self.scale, self.shift, self.mean = (vector(shape, dtype, self.generator) for _ in range(3))
        self.scale += torch.where(self.scale < 0, -0.5, 0.5)
        self.x_buffer, self.x = buffer(shape, form, dtype, self.generator)
        z = torch.randn(shape.n, shape.c, shape.s, generator=self.generator, dtype=torch.float64)
        z += torch.where(z < 0, -0.1, 0.1)
        self.x.copy_((z - wide(self.shift)) / wide(self.scale))
        self.z = self.x.double() * wide(self.scale) + wide(self.shift)
        assert not z.numel() or self.z.abs().min() > 0.02
        self.mask = (self.z > 0) if act == "relu" else torch.ones_like(self.z)
        self.magnitude = (self.x.double() * wide(self.scale)).abs() + wide(self.shift).abs()

    def fresh(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return buffer(self.shape, self.form, dtype or self.dtype, self.generator)


def check_batch_stats(kernels: Kernels, case: Case) -> None:
    mean, variance = kernels.batch_stats(case.x)
    assert mean.dtype == variance.dtype == accumulation(case.dtype)
    if case.x.shape[0] * case.x.shape[2] == 0:
        assert mean.isnan().all()
        assert variance.isnan().all()
        return
    x, count = case.x.double(), case.x.shape[0] * case.x.shape[2]
    true_mean = x.mean((0, 2))
    true_variance = (x - true_mean[:, None]).square().mean((0, 2))
    assert_within(mean, true_mean, sum_bound(x, case.dtype) / count, "mean")
    # in float64 the oracle's own sum is no better than ours
    share = 1e-13 if case.dtype == torch.float64 else ROUNDINGS * eps(torch.float32)
    assert_within(variance, true_variance, share * true_variance, "variance")


def check_scale_shift_act(
    kernels: Kernels, case: Case, out_dtype: torch.dtype | None = None, out_form: str | None = None
) -> None:
    out_dtype = out_dtype or case.dtype
    around, out = buffer(case.shape, out_form or case.form, out_dtype, case.generator)
    before, x_before = around.clone(), case.x_buffer.clone()
    kernels.scale_shift_act(case.x, case.scale, case.shift, case.act, out)
    oracle = case.z * case.mask
    assert_within(out, oracle, map_bound(oracle, case.magnitude, out_dtype), "out")
    assert_untouched(around, before, case.shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def check_act_backward_sums(kernels: Kernels, case: Case) -> None:
    around, grad = case.fresh()
    before, x_before = around.clone(), case.x_buffer.clone()
    masked = grad.double() * case.mask
    sums, sums_x = kernels.act_backward_sums_(grad, case.x, case.scale, case.shift, case.act, case.mean)
    assert sums.dtype == sums_x.dtype == accumulation(case.dtype)
    assert grad.double().equal(masked), "a mask only keeps or clears"
    terms = masked * (case.x.double() - wide(case.mean))
    assert_within(sums, masked.sum((0, 2)), sum_bound(masked, case.dtype), "sums")
    spread = masked * (case.x.double().abs() + wide(case.mean).abs())
    assert_within(sums_x, terms.sum((0, 2)), sum_bound(spread, case.dtype), "sums_x")
    assert_untouched(around, before, case.shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def check_act_backward_accumulate(kernels: Kernels, case: Case, grad_dtype: torch.dtype | None = None) -> None:
    grad_around, grad = case.fresh(grad_dtype)
    around, total = case.fresh()
    grad_before, before, x_before = grad_around.clone(), around.clone(), case.x_buffer.clone()
    sums, sums_x = (vector(case.shape, case.dtype, case.generator) for _ in range(2))
    masked = grad.double() * case.mask
    terms = masked * (case.x.double() - wide(case.mean))
    added = masked * wide(case.scale)
    oracle, oracle_sums, oracle_sums_x = (
        total.double() + added,
        sums.double() + masked.sum((0, 2)),
        sums_x.double() + terms.sum((0, 2)),
    )
    magnitude = total.double().abs() + added.abs()
    start, start_x = sums.double().abs(), sums_x.double().abs()
    kernels.act_backward_accumulate(grad, case.x, case.scale, case.shift, case.act, case.mean, total, sums, sums_x)
    assert_within(total, oracle, map_bound(oracle, magnitude, case.dtype), "total")
    acc = eps(accumulation(case.dtype))
    assert_within(sums, oracle_sums, sum_bound(masked, case.dtype) + acc * start, "sums")
    spread = masked * (case.x.double().abs() + wide(case.mean).abs())
    assert_within(sums_x, oracle_sums_x, sum_bound(spread, case.dtype) + acc * start_x, "sums_x")
    assert_untouched(around, before, case.shape)
    assert grad_around.equal(grad_before), "grad_z was changed"
    assert case.x_buffer.equal(x_before), "x was changed"


def check_affine_add(kernels: Kernels, case: Case, scaled: bool = True) -> None:
    around, grad = case.fresh()
    before, x_before = around.clone(), case.x_buffer.clone()
    kept = grad.double() * wide(case.scale) if scaled else grad.double()
    slope, offset = case.shift, case.mean
    oracle = kept + case.x.double() * wide(slope) + wide(offset)
    magnitude = kept.abs() + (case.x.double() * wide(slope)).abs() + wide(offset).abs()
    kernels.affine_add_(grad, case.scale if scaled else None, case.x, slope, offset)
    assert_within(grad, oracle, map_bound(oracle, magnitude, case.dtype), "grad")
    assert_untouched(around, before, case.shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def assert_untouched(around: Tensor, before: Tensor, shape: Shape) -> None:
    """The channels on both sides of the map are as they were."""
    inner = slice(shape.around, shape.around + shape.c)
    around, before = around.clone(), before.clone()
    around[:, inner] = before[:, inner] = 0
    assert around.equal(before), "numbers outside of the map were changed"


CHECKS: dict[str, Callable[[Kernels, Case], None]] = {
    "batch_stats": check_batch_stats,
    "scale_shift_act": check_scale_shift_act,
    "act_backward_sums_": check_act_backward_sums,
    "act_backward_accumulate": check_act_backward_accumulate,
    "affine_add_ scaled": check_affine_add,
    "affine_add_": lambda kernels, case: check_affine_add(kernels, case, scaled=False),
}
