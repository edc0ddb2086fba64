"""The report: what it names, how it prints, and what it is as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ParityError
from lowtide.verify import KINDS, Failure, ParityReport


def norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class TwiceNorm(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                super().forward(input)
        return super().forward(input)


@pytest.fixture(scope="module")
def failed() -> ParityReport:
    torch.manual_seed(0)
    candidate = norm_net()
    candidate[1] = TwiceNorm(4)
    return lowtide.verify(norm_net(), candidate, torch.randn(4, 2, 6, 6))


@pytest.fixture(scope="module")
def passed() -> ParityReport:
    torch.manual_seed(0)
    return lowtide.verify(norm_net(), norm_net(), torch.randn(4, 2, 6, 6))


def test_a_failure_has_kind_name_error_and_allowed_error(failed: ParityReport) -> None:
    first = failed.failures[0]
    assert isinstance(first, Failure)
    assert (first.kind, first.name) == ("buffer", "1.running_mean")
    assert first.error > first.allowed > 0
    assert first.index is not None
    assert len(first.index) == 1
    assert first.expected != first.got
    assert failed.first_module == "1"
    assert not failed.ok


def test_each_tensor_fails_once_however_many_steps_it_fails_in(failed: ParityReport) -> None:
    keys = [(f.kind, f.name) for f in failed.failures]
    assert len(keys) == len(set(keys))
    assert len(failed.failures[0].phases) > 3


def test_eval_output_is_judged_with_the_statistics_that_the_candidate_left(failed: ParityReport) -> None:
    assert [f.name for f in failed.failures if f.kind == "eval_output"] == ["output"]
    assert {f.kind for f in failed.consequences} <= {"input_grad", "param_grad"}


def test_table_says_the_verdict_last(failed: ParityReport, passed: ParityReport) -> None:
    assert str(failed).splitlines()[-1] == "FAILED: 3 buffer, 1 eval_output; first in 1"
    assert str(passed).splitlines()[-1].startswith("PASSED: the candidate is the same network")
    assert "1.running_mean" in str(failed)
    assert "float64" in str(passed)


def test_json_holds_the_failures_and_the_margins(failed: ParityReport, passed: ParityReport) -> None:
    bad, good = json.loads(failed.to_json()), json.loads(passed.to_json())
    assert bad["ok"] is False
    assert bad["first_module"] == "1"
    assert [f["kind"] for f in bad["failures"]] == [f.kind for f in failed.failures]
    assert set(bad["failures"][0]) >= {"kind", "name", "error", "allowed", "index", "expected", "got", "phases"}
    assert good["ok"] is True
    assert good["failures"] == []
    assert {c["kind"] for c in good["comparisons"]} <= set(KINDS)
    assert good["margins"][0]["dtype"] == "float32"
    assert good["margins"][0]["count"] == 4 * 4 * 4 * 4


def test_raise_if_failed_raises_the_table(failed: ParityReport, passed: ParityReport) -> None:
    passed.raise_if_failed()
    with pytest.raises(ParityError, match=r"1\.running_mean"):
        failed.raise_if_failed()


def test_the_name_is_the_function_and_the_package_still_imports() -> None:
    import importlib

    assert callable(lowtide.verify)
    package = importlib.import_module("lowtide.verify")
    assert package.verify is lowtide.verify
    assert package.ParityReport is lowtide.ParityReport
