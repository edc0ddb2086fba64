"""Norm, relu and a pool in one pass, and its backward, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import (
    ROUNDINGS,
    Case,
    Shape,
    accumulation,
    assert_untouched,
    assert_within,
    buffer,
    eps,
    map_bound,
    vector,
    wide,
)
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels import Kernels, TensorCalls
from lowtide.kernels.pools import average_pooled, max_pooled

# (images, channels, positions): borders alone, odd and even axes, one to three of them, several pieces of channels
GEOMETRIES = [
    (3, 5, (2, 2)),
    (2, 12, (57,)),
    (2, 39, (13, 8)),
    (1, 150, (9, 7)),
    (0, 4, (4, 4)),
    (2, 20, (5, 4, 7)),
    (40, 17, (11, 10)),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
POOLS = ["max", "average"]


def pool(x: Tensor, kind: str) -> Tensor:
    dims = x.dim() - 2
    if kind == "max":
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1](x, 3, 2, 1)
    return (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1](x, 2)


class PoolCase(Case):
    def __init__(self, index: int, form: str, dtype: torch.dtype, kind: str) -> None:
        n, c, self.spatial = GEOMETRIES[index]
        super().__init__(Shape(n, c, torch.Size(self.spatial).numel()), form, dtype, "relu", index)
        self.kind = kind
        self.pooled = max_pooled(self.spatial) if kind == "max" else average_pooled(self.spatial)
        self.out_shape = Shape(n, c, torch.Size(self.pooled).numel(), self.shape.around)
        self.acc = ROUNDINGS * eps(accumulation(dtype))

    def grid(self, x: Tensor) -> Tensor:
        return x.double().reshape(*x.shape[:2], *self.spatial)

    def out(self) -> tuple[Tensor, Tensor]:
        return buffer(self.out_shape, self.form, self.dtype, self.generator)

    def backward(self, grad: Tensor) -> Tensor:
        """m: the gradient by scale * x + shift, (N, C, S)."""
        z = self.grid(self.z).detach().requires_grad_()
        by_output = grad.double().reshape(*grad.shape[:2], *self.pooled)
        return torch.autograd.grad(pool(F.relu(z), self.kind), z, by_output)[0].flatten(2)


def check_forward(kernels: Kernels, case: PoolCase) -> None:
    around, out = case.out()
    before, x_before = around.clone(), case.x_buffer.clone()
    run = kernels.norm_act_max_pool if case.kind == "max" else kernels.norm_act_average_pool
    run(case.x, case.scale, case.shift, case.spatial, out)
    oracle = pool(F.relu(case.grid(case.z)), case.kind).flatten(2)
    magnitude = pool(case.grid(case.magnitude), case.kind).flatten(2)
    assert_within(out, oracle, map_bound(oracle, magnitude, case.dtype), "out")
    assert_untouched(around, before, case.out_shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def check_sums(case: PoolCase, m: Tensor, sums: Tensor, sums_x: Tensor, start: Tensor | None = None) -> None:
    centred = m * (case.x.double() - wide(case.mean))
    spread = m.abs() * (case.x.double().abs() + wide(case.mean).abs())
    first = torch.zeros_like(m[0, :, 0]) if start is None else start.double()
    for ours, terms, size, name in ((sums, m, m.abs(), "sums"), (sums_x, centred, spread, "sums_x")):
        assert_within(ours, first + terms.sum((0, 2)), case.acc * (size.sum((0, 2)) + first.abs()) + 1e-300, name)


def choices(case: PoolCase) -> Tensor:
    n, c, s = case.out_shape.n, case.out_shape.c, case.out_shape.s
    if case.form == "rows":
        return torch.empty(n, s, c, dtype=torch.int32).transpose(1, 2)
    return torch.empty(n, c, s, dtype=torch.int32)


def check_max_backward(kernels: Kernels, case: PoolCase) -> None:
    _, grad = case.out()
    around, out = case.fresh()
    before, x_before, grad_before = around.clone(), case.x_buffer.clone(), grad.clone()
    m, choice = case.backward(grad), choices(case)
    sums, sums_x = kernels.norm_act_max_pool_sums(grad, case.x, case.scale, case.shift, case.mean, case.spatial, choice)
    if case.shape.n:
        check_sums(case, m, sums, sums_x)
    slope, offset = (vector(case.shape, case.dtype, case.generator) for _ in range(2))
    kernels.norm_act_max_pool_backward(grad, case.x, choice, case.scale, slope, offset, case.spatial, out)
    parts = (m * wide(case.scale), case.x.double() * wide(slope), wide(offset))
    oracle = parts[0] + parts[1] + parts[2]
    # in float64 the oracle rounds as often as we do
    magnitude = (parts[0].abs() + parts[1].abs() + parts[2].abs()) * (2 if case.dtype == torch.float64 else 1)
    assert_within(out, oracle, map_bound(oracle, magnitude, case.dtype), "out")
    assert_untouched(around, before, case.shape)
    assert case.x_buffer.equal(x_before), "x was changed"
    assert grad.equal(grad_before), "grad was changed"
    kernels.norm_act_max_pool_backward(grad, case.x, choice, case.scale, slope, offset, case.spatial, case.x)
    assert case.x.equal(out), "in place"


def check_average_backward(
    kernels: Kernels, case: PoolCase, *, wants_total: bool = True, total_dtype: torch.dtype | None = None
) -> None:
    _, grad = case.out()
    total_dtype = total_dtype or accumulation(case.dtype)
    around, total = case.fresh(total_dtype)
    before, x_before, grad_before = around.clone(), case.x_buffer.clone(), grad.clone()
    m, start_total = case.backward(grad), total.double().clone()
    start = vector(case.shape, case.dtype, case.generator)
    sums, sums_x = start.clone(), start.clone()
    kernels.norm_act_average_pool_backward(
        grad, case.x, case.scale, case.shift, case.mean, case.spatial, total if wants_total else None, sums, sums_x
    )
    check_sums(case, m, sums, sums_x, start)
    if wants_total:
        oracle = start_total + m * wide(case.scale)
        magnitude = start_total.abs() + (m * wide(case.scale)).abs()
        assert_within(total, oracle, map_bound(oracle, magnitude, total_dtype), "total")
        assert_untouched(around, before, case.shape)
    else:
        assert around.equal(before)
    assert case.x_buffer.equal(x_before), "x was changed"
    assert grad.equal(grad_before), "grad was changed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", POOLS)
def test_forward(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    for form in ("planes", "rows"):
        for index in range(len(GEOMETRIES)):
            check_forward(kernels, PoolCase(index, form, dtype, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_of_the_max_pool(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in ("planes", "rows"):
        for index in range(len(GEOMETRIES)):
            check_max_backward(kernels, PoolCase(index, form, dtype, "max"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_of_the_average_pool(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in ("planes", "rows"):
        for index in range(len(GEOMETRIES)):
            check_average_backward(kernels, PoolCase(index, form, dtype, "average"))
    check_average_backward(kernels, PoolCase(2, "rows", dtype, "average"), wants_total=False)
    check_average_backward(kernels, PoolCase(2, "rows", dtype, "average"), total_dtype=dtype)


def test_of_equal_numbers_the_first_is_taken_and_a_nan_wins(kernels: Kernels) -> None:
    x = torch.ones(1, 1, 5, 5)
    x[0, 0, 3, 3] = float("nan")
    expected, taken = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    x_rows = in_rows(x)
    one, zero = torch.ones(1), torch.zeros(1)
    out, choice = torch.empty(1, 9, 1).transpose(1, 2), torch.empty(1, 9, 1, dtype=torch.int32).transpose(1, 2)
    kernels.norm_act_max_pool(x_rows, one, zero, (5, 5), out)
    kernels.norm_act_max_pool_sums(torch.ones_like(out), x_rows, one, zero, zero, (5, 5), choice)
    torch.testing.assert_close(out, expected.flatten(2), equal_nan=True)
    assert choice.flatten().tolist() == taken.flatten().tolist()


@pytest.mark.parametrize("kind", POOLS)
def test_numbers_that_are_not_finite_go_as_in_torch(kernels: Kernels, kind: str) -> None:
    """A NaN and both infinities, odd sizes: the values and gradients of ordinary autograd, NaN where it has NaN."""
    x = torch.randn(2, 20, 7, 5, generator=torch.Generator().manual_seed(0))
    x[0, 3, 2, 2], x[0, 4, 6, 4], x[1, 19, 3, 0] = float("nan"), float("inf"), float("-inf")
    plain = x.clone().requires_grad_()
    expected = pool(F.relu(plain), kind)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (by_x,) = torch.autograd.grad(expected, plain, grad)
    flat, one, zero = in_rows(x), torch.ones(20), torch.zeros(20)
    out, by_ours = in_rows(torch.empty(expected.shape)), in_rows(torch.zeros_like(x))
    if kind == "max":
        kernels.norm_act_max_pool(flat, one, zero, (7, 5), out)
        choice = in_rows(torch.empty(expected.shape, dtype=torch.int32))
        kernels.norm_act_max_pool_sums(in_rows(grad), flat, one, zero, zero, (7, 5), choice)
        finite = in_rows(x.nan_to_num(0, 0, 0))  # 0 times infinity would be NaN everywhere
        kernels.norm_act_max_pool_backward(in_rows(grad), finite, choice, one, zero, zero, (7, 5), by_ours)
    else:
        kernels.norm_act_average_pool(flat, one, zero, (7, 5), out)
        sums = torch.zeros(2, 20)
        kernels.norm_act_average_pool_backward(in_rows(grad), flat, one, zero, zero, (7, 5), by_ours, *sums)
    assert not expected.isfinite().all()
    torch.testing.assert_close(out, expected.flatten(2), equal_nan=True)
    torch.testing.assert_close(by_ours, by_x.flatten(2))


def in_rows(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)


def test_the_number_of_threads_changes_nothing(kernels: Kernels) -> None:
    if kernels.name != "native":
        pytest.skip("torch's own reductions depend on the number of threads")
    case = PoolCase(6, "rows", torch.float32, "max")
    _, grad = case.out()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            arguments = (grad, case.x, case.scale, case.shift, case.mean, case.spatial, choices(case))
            results.append(torch.stack(kernels.norm_act_max_pool_sums(*arguments)))
    finally:
        torch.set_num_threads(before)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


class LastOfEqual(TensorCalls):
    """The window is read backwards: of equal numbers the last one is taken."""

    def norm_act_max_pool_sums(self, grad, x, scale, shift, mean, spatial, choice):
        turned = torch.empty_like(choice)
        flip = [t.flip(2) if t.dim() == 3 else t for t in (grad, x)]
        sums = super().norm_act_max_pool_sums(*flip, scale, shift, mean, spatial, turned)
        choice.copy_(x.shape[2] - 1 - turned.flip(2))
        return sums


class PassesThroughRelu(TensorCalls):
    """The gradient is not stopped where relu's output is 0."""

    def norm_act_max_pool_sums(self, grad, x, scale, shift, mean, spatial, choice):
        super().norm_act_max_pool_sums(grad, x, scale, shift.abs() + 9, mean, spatial, choice)
        return grad.sum((0, 2)), grad.sum((0, 2))


class CountsTheBorder(TensorCalls):
    """What is left over at the end of an odd axis takes part."""

    def norm_act_average_pool(self, x, scale, shift, spatial, out):
        super().norm_act_average_pool(x.roll(1, 2), scale, shift, spatial, out)


def test_faults_are_refused() -> None:
    with pytest.raises(AssertionError):
        test_of_equal_numbers_the_first_is_taken_and_a_nan_wins(LastOfEqual())
    with pytest.raises(AssertionError, match="sums"):
        check_max_backward(PassesThroughRelu(), PoolCase(2, "rows", torch.float32, "max"))
    with pytest.raises(AssertionError, match="out"):
        check_forward(CountsTheBorder(), PoolCase(2, "rows", torch.float32, "average"))
