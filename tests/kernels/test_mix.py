"""Norm, relu and 1x1 convolution in one pass, and its backward, against the float64 oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_oracle import (
    ROUNDINGS,
    SHAPES,
    Case,
    Shape,
    accumulation,
    assert_untouched,
    assert_within,
    buffer,
    eps,
    map_bound,
    wide,
)
from torch import Tensor

from lowtide.kernels import Kernels, Normed, TensorCalls

# channels out: less than a register, whole tiles of every width, and tails of them
OUTPUTS = [1, 5, 12, 16, 48, 50, 64, 83, 128, 130]
CASES = list(zip(itertools.cycle(SHAPES), OUTPUTS, strict=False))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def forms(kernels: Kernels) -> list[str]:
    return ["rows"] if kernels.name == "native" else ["planes", "rows"]


def mix(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("kc,ncs->nks", matrix.double(), x.double())


class MixCase(Case):
    def __init__(self, shape: Shape, n_outputs: int, form: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__(shape, form, dtype, "relu", seed)
        self.out_shape = Shape(shape.n, n_outputs, shape.s, shape.around)
        numbers = torch.randn(n_outputs, shape.c, generator=self.generator, dtype=torch.float64)
        self.weight = numbers.to(accumulation(dtype))
        self.relu = self.z * self.mask
        # in float64 the oracle's own sums are no better than ours
        self.acc = ROUNDINGS * (4 if dtype == torch.float64 else 1) * eps(accumulation(dtype))

    def out(self) -> tuple[Tensor, Tensor]:
        return buffer(self.out_shape, self.form, self.dtype, self.generator)

    def out_vector(self) -> Tensor:
        return torch.randn(self.out_shape.c, generator=self.generator).to(self.weight.dtype)


def check_forward(kernels: Kernels, case: MixCase) -> None:
    around, out = case.out()
    before, x_before = around.clone(), case.x_buffer.clone()
    kernels.norm_act_mix(case.x, case.scale, case.shift, case.weight, out)
    oracle = mix(case.weight, case.relu)
    # as many roundings of a term as of the product: long sums are cut into short ones or their errors cancel
    magnitude = mix(case.weight.abs(), case.magnitude)
    assert_within(out, oracle, map_bound(oracle, magnitude, case.dtype), "out")
    assert_untouched(around, before, case.out_shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def check_backward(kernels: Kernels, case: MixCase, *, normed: bool, parts: str = "total sums dweight") -> None:
    grad_around, grad = case.out()
    _, y = case.out()
    total_around, total = case.fresh()
    norm = Normed(y, case.out_vector(), case.out_vector(), case.out_vector()) if normed else None
    g, g_magnitude = grad.double(), grad.double().abs()
    if norm is not None:
        terms = g * wide(norm.scale), y.double() * wide(norm.slope), wide(norm.offset).expand(g.shape)
        g, g_magnitude = sum(terms), sum(t.abs() for t in terms)
    sums, sums_x = (torch.randn(case.shape.c, generator=case.generator).to(case.scale.dtype) for _ in range(2))
    dweight = torch.randn(case.weight.shape, generator=case.generator).to(case.weight.dtype)

    m = mix(case.weight.t(), g) * case.mask
    m_magnitude = mix(case.weight.abs().t(), g_magnitude) * case.mask
    oracle_total = total.double() + m * wide(case.scale)
    centred = case.x.double() - wide(case.mean)
    oracle_sums = sums.double() + m.sum((0, 2)), sums_x.double() + (m * centred).sum((0, 2))
    oracle_dweight = dweight.double() + torch.einsum("nks,ncs->kc", g, case.relu)
    spread = m_magnitude * (case.x.double().abs() + wide(case.mean).abs())
    start = [t.double().abs() for t in (sums, sums_x, dweight)]
    total_before, x_before, y_before = total_around.clone(), case.x_buffer.clone(), y.clone()
    start_total = total.double().abs()

    kernels.norm_act_mix_backward(
        grad, case.x, case.scale, case.shift, case.mean, case.weight, normed=norm,
        total=total if "total" in parts else None,
        sums=sums if "sums" in parts else None,
        sums_x=sums_x if "sums" in parts else None,
        dweight=dweight if "dweight" in parts else None,
    )  # fmt: skip
    if "total" in parts:
        magnitude = start_total + m_magnitude * wide(case.scale).abs()
        assert_within(total, oracle_total, map_bound(oracle_total, magnitude, case.dtype), "total")
        assert_untouched(total_around, total_before, case.shape)
    else:
        assert total_around.equal(total_before)
    if "sums" in parts:
        assert_within(sums, oracle_sums[0], case.acc * (m_magnitude.sum((0, 2)) + start[0]), "sums")
        assert_within(sums_x, oracle_sums[1], case.acc * (spread.sum((0, 2)) + start[1]), "sums_x")
    if "dweight" in parts:
        magnitude = torch.einsum("nks,ncs->kc", g_magnitude, case.magnitude)
        assert_within(dweight, oracle_dweight, case.acc * (magnitude + start[2]), "dweight")
    assert case.x_buffer.equal(x_before), "x was changed"
    assert y.equal(y_before), "y was changed"
    del grad_around


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in forms(kernels):
        for seed, (shape, n_outputs) in enumerate(CASES):
            check_forward(kernels, MixCase(shape, n_outputs, form, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in forms(kernels):
        for seed, (shape, n_outputs) in enumerate(CASES):
            check_backward(kernels, MixCase(shape, n_outputs, form, dtype, seed), normed=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_backward_through_the_next_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in forms(kernels):
        for seed, (shape, n_outputs) in enumerate(CASES):
            check_backward(kernels, MixCase(shape, n_outputs, form, dtype, seed), normed=True)


@pytest.mark.parametrize("parts", ["total sums", "sums", "sums dweight", "dweight"])
def test_backward_of_what_is_asked_for(kernels: Kernels, parts: str) -> None:
    for form in forms(kernels):
        for shape in SHAPES[3:5]:
            check_backward(kernels, MixCase(shape, 17, form, torch.float32, 1), normed=True, parts=parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights(kernels: Kernels, dtype: torch.dtype) -> None:
    case = MixCase(Shape(2, 39, 49), 50, "rows", dtype, 0)
    weight = case.weight.to(dtype)
    _, out = case.out()
    kernels.norm_act_mix(case.x, case.scale, case.shift, weight, out)
    oracle = mix(weight, case.relu)
    assert (out.double() - oracle).norm() <= eps(dtype) * oracle.norm()


def test_which_maps_are_taken_in_one_sweep(kernels: Kernels) -> None:
    rows, planes = torch.zeros(2, 7, 5).transpose(1, 2), torch.zeros(2, 5, 7)
    assert kernels.fuses_mix(rows, rows) == (kernels.name == "native")
    assert not kernels.fuses_mix(planes, rows)


class ForgetsTheMask(TensorCalls):
    """The gradient by x is not masked where relu was zero."""

    def act_backward_accumulate(self, grad_z, x, scale, shift, act, mean, total, sums, sums_x):
        super().act_backward_accumulate(grad_z, x, scale, shift, "identity", mean, total, sums, sums_x)


class OneThreadsWeightGradient(TensorCalls):
    """Of the weight gradient only the last image's part arrives."""

    def norm_act_mix_backward(self, grad, x, scale, shift, mean, weight, *, dweight, **others):
        super().norm_act_mix_backward(grad, x, scale, shift, mean, weight, dweight=None, **others)
        last = {**others, "total": None, "sums": None, "sums_x": None, "normed": None}
        super().norm_act_mix_backward(grad[-1:], x[-1:], scale, shift, mean, weight, dweight=dweight, **last)


@pytest.mark.parametrize(("fault", "what"), [(ForgetsTheMask, "total"), (OneThreadsWeightGradient, "dweight")])
def test_fault_is_refused(fault: type[TensorCalls], what: str) -> None:
    case = MixCase(SHAPES[-1], 48, "rows", torch.float32, 0)
    with pytest.raises(AssertionError, match=what):
        check_backward(fault(), case, normed=False)
