"""A check that would pass whatever the answer says so instead of passing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.verify import ParityReport


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


def empty(report: ParityReport) -> list[str]:
    assert {f.kind for f in report.failures} == {"empty"}, str(report)
    return [f.name for f in report.failures]


def test_zero_input() -> None:
    assert "input" in empty(lowtide.verify(net(), net(), torch.zeros(3, 2, 8)))


def test_zero_output() -> None:
    assert empty(lowtide.verify(lambda x: x * 0, lambda x: x * 0, torch.randn(3))) == ["output"]


def test_output_that_is_not_finite() -> None:
    assert empty(lowtide.verify(lambda x: x / 0, lambda x: x / 0, torch.ones(3))) == ["output"]


def test_nothing_returned() -> None:
    assert empty(lowtide.verify(lambda x: None, lambda x: None, torch.ones(3))) == ["output"]


def test_loss_without_a_gradient() -> None:
    """After a batch norm without affine part the sum has no gradient: any backward would pass."""

    def norm_last() -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4, affine=False))

    x = torch.randn(3, 2, 8)
    assert lowtide.verify(norm_last(), norm_last(), x, without=["eval"]).ok
    report = lowtide.verify(norm_last(), norm_last(), x, loss=lambda y: 0 * y.sum(), without=["eval"])
    assert empty(report) == ["param_grad"]


def test_dead_network() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x) - 1e6))

    report = lowtide.verify(Dead(), Dead(), torch.randn(3, 4))
    assert empty(report) == ["param_grad"]
    assert "first.weight" in report.failures[0].message


def test_a_few_zero_gradients_are_a_note() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.gate = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) + 0 * self.gate

    report = lowtide.verify(Gated(), Gated(), torch.randn(3, 4))
    assert report.ok
    assert any("zero gradients" in note and note.endswith("gate") for note in report.notes)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_small_and_large_answers_are_no_less_checked(scale: float) -> None:
    x = torch.randn(5)
    assert lowtide.verify(lambda x: scale * x, lambda x: scale * x, x).ok
    for wrong in (0.0, -scale, 1.01 * scale):
        report = lowtide.verify(lambda x: scale * x, lambda x, wrong=wrong: wrong * x, x)
        assert [f.kind for f in report.failures] == ["output"]
