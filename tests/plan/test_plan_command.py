"""`lowtide plan`: table, JSON, chart, exit codes, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli import run

MODEL = ["plan", "--model", "lowtide:densenet_bc-22-4", "--input", "8x3x32x32"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*MODEL, "--budget", "1GiB", "--optimizer", "adamw"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("none", "pointwise", "layer", "block")] == [
        "none", "pointwise", "layer", "block",
    ]  # fmt: skip
    assert "chosen" in out
    assert "a batch of 8 fits" in out


def test_json_and_exit_code_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*MODEL, "--budget", "2MiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["predicted_peak_bytes"] - found["shortfall_bytes"] == found["budget_bytes"] == 2 * 2**20
    assert found["advice"]
    assert [p["level"] for p in found["at_levels"]] == ["none", "pointwise", "layer", "block"]
    assert sum(found["memory"].values()) == found["predicted_peak_bytes"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_chart(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"levels{suffix}"
    run([*MODEL, "--plot", str(path)])
    assert path.stat().st_size > 1000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--budget", "lots"], "--budget"),
        (["--budget", "0"], "--budget"),
        (["--budget", "1KiB"], "parameters alone"),
        (["--optimizer", "lion"], "--optimizer"),
        (["--input", "8x3x32"], "(8, 3, 32)"),
        (["--input", "8x4x32x32"], "(8, 4, 32, 32)"),
        (["--input", "8by3"], "--input"),
        (["--model", "torchvision:densenet999"], "densenet999"),
        (["--model", "nowhere:densenet"], "nowhere"),
        (["--plot", "levels.txt"], "--plot"),
    ],
)
def test_refusals(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*MODEL, *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_without_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "lowtide:densenet_bc-22-4"]) == 2
    assert "--input" in capsys.readouterr().err
