"""`lowtide verify` on a pair in a file outside the project: exit codes, table, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli import run
from lowtide.models.pairs import resolve_pair

PAIR = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(50, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        if self.fault == "crash":
            raise RuntimeError("not this length")
        y = self.norm(self.embedding(tokens))
        return self.head(y) * (1.01 if self.fault == "scale" else 1)


def plain():
    return Net()


def scaled():
    return Net("scale")


def crash():
    return Net("crash")


def with_inputs():
    return Net(), torch.arange(8).view(2, 4)
"""


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "my_pair.py"
    path.write_text(PAIR)
    return str(path)


def test_equal_pair_exits_with_0(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", f"{pair}:plain", f"{pair}:plain", "--input", "2x8:50"]) == 0
    assert "PASSED" in capsys.readouterr().out


def test_different_pair_exits_with_1_and_says_where(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", f"{pair}:plain", f"{pair}:scaled", "--input", "2x8:50", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [f["kind"] for f in report["failures"]] == ["output"]
    assert report["reference"] == f"{pair}:plain"


def test_crash_of_the_candidate_is_shown_with_its_traceback(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", f"{pair}:with_inputs", f"{pair}:crash"]) == 1
    out = capsys.readouterr().out
    assert "the candidate raised RuntimeError: not this length" in out
    assert "my_pair.py" in out
    assert "FAILED: 1 error" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["PAIR:plain", "PAIR:plain"], "give --input"),
        (["PAIR:crash", "PAIR:plain", "--input", "2x8:50"], "the reference in step 1 (float64)"),
        (["PAIR:plain", "PAIR:plain", "--input", "2x8"], "the reference in step 1"),
        (["PAIR:plain"], "a built-in name"),
        (["PAIR:nothing", "PAIR:plain"], "nothing"),
        (["PAIR:plain", "PAIR:plain", "--input", "2x8:50", "--steps", "0"], "steps to be an integer >= 1"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(pair: str, capsys, arguments: list[str], text: str) -> None:
    assert run(["verify", *(a.replace("PAIR", pair) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert text in captured.err


def test_one_built_in_name_compares_its_two_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["verify", "lowtide:densenet_bc-10-4", "--input", "3x3x8x8", "--recompute", "layer", "--steps", "1"]) == 0
    )
    out = capsys.readouterr().out
    assert "candidate lowtide:densenet_bc-10-4 (recompute=layer)" in out


def test_pairs_have_the_forms_they_name() -> None:
    plain, lean, _ = resolve_pair("lowtide:densenet_bc-10-4", "layer")
    assert {m.recompute for m in plain.modules() if hasattr(m, "recompute")} == {"none"}
    assert {m.recompute for m in lean.modules() if hasattr(m, "recompute")} == {"layer"}
