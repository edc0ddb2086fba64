"""The low-precision rule, the margin from kinks, and random numbers replayed in the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.verify.draws import DrawRecorder, DrawReplayer, NotReplayableError
from lowtide.verify.kinks import KinkRecorder
from lowtide.verify.rule import Rule, judge


def allowed(error: float, dtype: torch.dtype, oracle: Tensor, plain: Tensor | None, noise: float = 0.0) -> bool:
    """Whether `oracle` plus an error of that norm passes."""
    direction = torch.zeros_like(oracle)
    direction.view(-1)[0] = error
    rule = Rule("x", None if dtype == torch.float64 else torch.finfo(dtype).eps)
    ours = oracle + direction
    return judge("output", "x", "", rule, oracle, ours, plain, noise=noise).ok


ORACLE = torch.tensor([3.0, 4.0], dtype=torch.float64)  # scale 5


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01])
def test_zero_negated_and_one_percent_off_are_rejected(factor: float) -> None:
    for eps, plain in ((None, None), (torch.finfo(torch.float32).eps, ORACLE * (1 + 1e-6))):
        assert not judge("output", "x", "", Rule("x", eps), ORACLE, ORACLE * factor, plain).ok


def test_float64_bound_is_1e9_of_scale() -> None:
    assert allowed(4.9e-9, torch.float64, ORACLE, None)
    assert not allowed(5.1e-9, torch.float64, ORACLE, None)


def test_low_precision_bound_is_twice_plain_plus_four_eps() -> None:
    plain = ORACLE + torch.tensor([0.0, 1e-5], dtype=torch.float64)
    bound = 2e-5 + 4 * torch.finfo(torch.float32).eps * 5
    assert allowed(0.99 * bound, torch.float32, ORACLE, plain)
    assert not allowed(1.01 * bound, torch.float32, ORACLE, plain)


def test_where_the_true_value_is_zero_the_largest_gives_the_scale() -> None:
    noise_only = torch.tensor([1e-17, 0.0], dtype=torch.float64)
    assert allowed(0.9e-9, torch.float64, noise_only, None, noise=1.0)
    assert not allowed(1.1e-9, torch.float64, noise_only, None, noise=1.0)
    small_but_real = torch.tensor([1e-6, 0.0], dtype=torch.float64)
    assert not allowed(1e-13, torch.float64, small_but_real, None, noise=1.0)


def test_nan_is_never_within_bounds_and_equal_infinities_are() -> None:
    inf = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert judge("output", "x", "", Rule("x"), inf, inf.clone(), None).ok
    for bad in ([1.0, 2.0], [1.0, math.inf], [math.nan, -math.inf], [1.0, math.nan]):
        assert not judge("output", "x", "", Rule("x"), inf, torch.tensor(bad, dtype=torch.float64), None).ok


def test_integers_must_be_equal() -> None:
    n = torch.tensor([3, 4])
    assert judge("buffer", "n", "", Rule("x", 1e-7), n, n.clone(), n).ok
    assert not judge("buffer", "n", "", Rule("x", 1e-7), n, n + 1, n).ok


def test_a_bias_before_a_batch_norm_passes_though_its_gradient_is_zero() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(96, 2))

    class OtherOrder(nn.Conv2d):
        """The same convolution in another order of sums, so that the zero gradient has other rounding noise."""

        def forward(self, input: Tensor) -> Tensor:
            columns = F.unfold(input.flip(0), 3).flip(0)
            return (self.weight.flatten(1) @ columns + self.bias[:, None]).unflatten(-1, (4, 4))

    torch.manual_seed(0)
    candidate = build()
    candidate[0] = OtherOrder(3, 6, 3)
    report = lowtide.verify(build(), candidate, torch.randn(4, 3, 6, 6))
    assert report.ok, str(report)
    (row,) = [r for r in report.rows if (r.name, r.phase, r.dtype) == ("0.bias", "step 1", "float64")]
    assert 0 < row.error < row.allowed


@pytest.mark.parametrize(
    ("function", "x", "smallest", "count"),
    [
        (F.relu, [-2.0, 0.5, 0.0, 1.0], 0.5, 4),
        (lambda x: F.relu_(x.clone()), [-2.0, 0.5, 0.0, 1.0], 0.5, 4),
        (lambda x: F.hardtanh(x), [-2.0, 0.5, 0.75, 1.5], 0.25, 8),
        (lambda x: x.clamp(min=1.0), [-2.0, 0.5, 0.75, 1.5], 0.25, 4),
        (torch.abs, [-2.0, 0.5, 0.25, 1.5], 0.25, 4),
        (lambda x: x * (x > 0.5), [-2.0, 0.4, 0.25, 1.5], 0.1, 4),
        (lambda x: F.max_pool2d(x.view(1, 1, 2, 2), 2), [-2.0, 0.5, 0.25, 1.5], 1.0, 1),
        (lambda x: x.amax(0), [-2.0, 0.5, 0.25, 1.5], 1.0, 1),
        (F.gelu, [-2.0, 0.5, 0.25, 1.5], math.inf, 0),
    ],
)
def test_kinks_are_measured_relative_to_the_rms_of_their_input(function, x, smallest, count) -> None:
    value = torch.tensor(x, dtype=torch.float64)
    rms = float(value.square().mean().sqrt())
    with KinkRecorder() as kinks:
        function(value)
    assert kinks.count == count
    assert kinks.smallest == pytest.approx(smallest / rms)


def test_gradients_near_a_kink_are_not_judged_and_the_report_says_so() -> None:
    class Kinked(nn.Module):
        def __init__(self, shift: float = 0.0) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.ones(3)), shift

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return F.relu(y + self.shift if y.dtype == torch.float32 else y)

    x = torch.tensor([[1.0, -2.0, 3.0], [1e-8, 2.0, -1.0]])
    report = lowtide.verify(Kinked(), Kinked(-1e-7), x)  # the shift turns the gradient at 1e-8 off, in float32
    (margin,) = report.margins
    assert not margin.decidable
    assert margin.smallest == pytest.approx(1e-8 / float(x.square().mean().sqrt()))
    assert "not decidable in this dtype" in str(report)
    assert not any(r.kind in ("param_grad", "input_grad") for r in report.rows if r.dtype == "float32")
    clear = lowtide.verify(Kinked(), Kinked(), x.round())
    assert clear.margins[0].decidable
    assert any(r.kind == "param_grad" for r in clear.rows if r.dtype == "float32")


class Noisy(nn.Module):
    """Draws that differ between float32 and float64: the oracle must be given the float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.training:
            return y
        keep = torch.rand_like(y[:, :1]) > 0.3  # stochastic depth
        return F.dropout(y, 0.4) + 0.1 * torch.randn_like(y) * y * keep


def test_random_networks_are_judged_in_low_precision() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        report = lowtide.verify(Noisy(), Noisy(), torch.randn(6, 5), dtype=dtype, seed=3)
        assert report.ok
        judged = {r.kind for r in report.rows if r.dtype == str(dtype).removeprefix("torch.") and r.phase == "step 1"}
        assert judged >= {"output", "rng"}
        assert not any("not decidable" in note for note in report.notes)


def test_recorded_draws_stand_in_for_new_ones() -> None:
    def draw(dtype: torch.dtype) -> list[Tensor]:
        x = torch.ones(4, 5, dtype=dtype)
        return [
            torch.rand_like(x),
            torch.randn(3, dtype=dtype),
            F.dropout(x, 0.5),
            torch.randperm(7),
            x.clone().normal_(),
        ]

    torch.manual_seed(0)
    with DrawRecorder() as recorder:
        recorded = draw(torch.float32)
    torch.manual_seed(1)
    with DrawReplayer(recorder.draws):
        replayed = draw(torch.float64)
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(recorded, replayed, strict=True))
    assert replayed[0].dtype == torch.float64
    with DrawReplayer(recorder.draws), pytest.raises(NotReplayableError, match="randn was asked for where rand_like"):
        torch.randn(3)
    with DrawReplayer([]), pytest.raises(NotReplayableError, match="not called in the recorded run"):
        torch.rand(2)
