"""Every pass of every provider against the float64 oracle: odd sizes, slices of buffers, both forms, every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_oracle import CHECKS, SHAPES, Case, Shape, check_act_backward_accumulate, check_scale_shift_act

from lowtide.kernels import Kernels

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("name", CHECKS)
def test_pass(kernels: Kernels, name: str, form: str, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        for act in ("relu", "identity"):
            CHECKS[name](kernels, Case(shape, form, dtype, act, seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_may_be_written_as_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        check_scale_shift_act(kernels, Case(shape, "planes", dtype, "relu", seed), out_form="rows")


@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("other", HALVES, ids=str)
def test_maps_of_several_dtypes(kernels: Kernels, dtype: torch.dtype, other: torch.dtype, form: str) -> None:
    for seed, shape in enumerate(SHAPES):
        check_scale_shift_act(kernels, Case(shape, form, dtype, "relu", seed), out_dtype=other)
        check_act_backward_accumulate(kernels, Case(shape, form, dtype, "relu", seed), grad_dtype=other)


@pytest.mark.parametrize("form", ["planes", "rows"])
def test_in_place(kernels: Kernels, form: str) -> None:
    case = Case(Shape(2, 39, 49), form, torch.float32)
    expected = case.z * case.mask
    kernels.scale_shift_act(case.x, case.scale, case.shift, "relu", case.x)
    assert (case.x.double() - expected).norm() <= 1e-6 * expected.norm()


def test_expanded_input(kernels: Kernels) -> None:
    case = Case(Shape(1, 6, 65, around=0), "planes", torch.float32)
    one = case.x
    for many in (one.expand(3, -1, -1), one[:, :1].expand(-1, 6, -1)):
        mean, _ = kernels.batch_stats(many)
        assert torch.allclose(mean.double(), many.double().mean((0, 2)), rtol=1e-6, atol=1e-7)
        out = torch.empty(many.shape)
        kernels.scale_shift_act(many, case.scale, case.shift, "identity", out)
        expected = many.double() * case.scale.double()[:, None] + case.shift.double()[:, None]
        assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_statistics_far_from_zero(kernels: Kernels, form: str, dtype: torch.dtype) -> None:
    """Deviations of 1e-3 of the mean: a sum of squares that is not centred would lose half the digits of float32."""
    case = Case(Shape(3, 17, 1370), form, dtype)
    case.x.copy_(torch.randn(case.x.shape, generator=case.generator) * 0.05 + 50)
    CHECKS["batch_stats"](kernels, case)
    case.x[0, :, 0] = 0  # a first number that is no sample of the rest
    CHECKS["batch_stats"](kernels, case)


@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_channel_has_no_variance(kernels: Kernels, form: str, dtype: torch.dtype) -> None:
    case = Case(Shape(3, 5, 77), form, dtype)
    case.x.fill_(3.25)
    mean, variance = kernels.batch_stats(case.x)
    assert mean.eq(3.25).all()
    assert variance.eq(0).all()


@pytest.mark.parametrize("form", ["planes", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_pass_through(kernels: Kernels, form: str, dtype: torch.dtype) -> None:
    """As in torch: relu keeps a NaN, and the gradient behind a NaN is let through. In registers and in tails."""
    case = Case(Shape(2, 21, 37), form, dtype)
    bad = torch.zeros(case.x.shape, dtype=torch.bool)
    bad[1, :, ::5] = True
    case.x[bad] = math.nan
    _, out = case.fresh()
    kernels.scale_shift_act(case.x, case.scale, case.shift, "relu", out)
    assert out.isnan().equal(bad)
    _, grad = case.fresh()
    before = grad.clone()
    sums, sums_x = kernels.act_backward_sums_(grad, case.x, case.scale, case.shift, "relu", case.mean)
    assert grad[bad].equal(before[bad])
    assert sums.isfinite().all()
    assert sums_x.isnan().all()
    mean, variance = kernels.batch_stats(case.x)
    assert mean.isnan().all()
    assert variance.isnan().all()
    case.x[bad] = math.inf
    case.scale.abs_()
    kernels.scale_shift_act(case.x, case.scale, case.shift, "relu", out)
    assert out.isinf().equal(bad)
    assert not kernels.batch_stats(case.x)[1].isfinite().any()


def test_result_is_the_same_on_any_number_of_threads(kernels: Kernels) -> None:
    if kernels.name == "tensor":
        pytest.skip("torch's own reductions depend on the number of threads")
    before = torch.get_num_threads()
    try:
        for form in ("planes", "rows"):
            results = []
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                case = Case(Shape(3, 24, 3001), form, torch.float32)
                _, grad = case.fresh()
                _, total = case.fresh()
                stats = kernels.batch_stats(case.x)
                sums = kernels.act_backward_sums_(grad, case.x, case.scale, case.shift, "relu", case.mean)
                more = torch.zeros(2, 24)
                arguments = (case.scale, case.shift, "relu", case.mean, total, more[0], more[1])
                kernels.act_backward_accumulate(grad, case.x, *arguments)
                results.append([*stats, *sums, grad, total, more])
            for other in results[1:]:
                assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(before)
