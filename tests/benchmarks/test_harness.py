"""What the harness measures of steps whose bytes are known, and what it says of a peer that is not there."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import harness
import machine
import pytest
import torch
from harness import Contender, run_case

NUMBERS = 1 << 22
ONE_ARRAY = 4 * NUMBERS
CONTENDERS = [
    Contender("small", "bench_steps:squares", {"numbers": NUMBERS}, baseline=True),
    Contender("a peer", "bench_steps:squares", needs="no_such_package"),
    Contender("compiled for minutes", "bench_steps:squares", slow=True),
    Contender("a slow peer", "bench_steps:squares", skip="not run at this size"),
]


def no_peaks(*_: object) -> harness.Peaks:
    return {"peak": 8, "first_step": 4, "allocated": 8, "kept": 2}


def test_bytes_of_a_known_step() -> None:
    """Kept: x (part of the base) and sqrt's result are needed, x * x is not; the peak adds x * x and gradients."""
    (small,) = run_case("squares", CONTENDERS[:1], repeats=3, steps=2)
    assert ONE_ARRAY <= small.kept_bytes <= 2 * ONE_ARRAY
    assert 3 * ONE_ARRAY <= small.allocated_bytes <= 5 * ONE_ARRAY
    # a process has what the step has, code that is loaded on first use, and later malloc's holes
    assert 0.9 * small.allocated_bytes <= small.peak_first_step_bytes < small.allocated_bytes + 64 * 2**20
    assert small.peak_first_step_bytes * 0.9 <= small.peak_bytes
    assert (small.time_ratio, small.peak_ratio, small.repeats) == (1.0, 1.0, 3)
    assert 0 < small.seconds_p20 <= small.seconds <= small.seconds_p80


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(harness, "peaks", no_peaks)
    present, *others = run_case("squares", CONTENDERS, repeats=1)
    notes = [
        "not installed (pip install no-such-package)",
        "left out: compiles for minutes, --slow runs it",
        "not run at this size",
    ]
    assert present.note == ""
    assert [f.note for f in others] == notes
    assert all(math.isnan(f.seconds) and f.peak_bytes == 0 for f in others)
    printed = capsys.readouterr().out
    assert all(f"{f.contender}: {f.note}" in printed for f in others)
    assert "baseline: small; alone: python benchmarks/one.py bench_steps:squares" in printed


def test_a_missing_baseline_leaves_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "peaks", no_peaks)
    contenders = [
        Contender("peer", "bench_steps:squares", baseline=True, needs="no_such_package"),
        Contender("ours", "bench_steps:squares", {"numbers": 100}),
    ]
    _, ours = run_case("squares", contenders, repeats=1)
    assert ours.peak_bytes == 8
    assert math.isnan(ours.time_ratio)
    assert math.isnan(ours.peak_ratio)


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(harness, "build", lambda c: lambda: order.append(c.name))
    found = harness.times([Contender(name, "") for name in "abc"], repeats=3, warmup=1)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_rows_hold_machine_versions_commit_and_command(tmp_path: Path) -> None:
    figures = [harness.Figure("squares", c.name, seconds=1.0, alone=c.alone) for c in CONTENDERS]
    about = machine.machine()
    path = tmp_path / machine.file_name("densenet", "bc100", about)
    machine.write_csv(path, figures, about, "python benchmarks/run.py densenet --only bc100")
    assert re.fullmatch(r"densenet-bc100-[a-z0-9-]+-\d{4}-\d\d-\d\d\.csv", path.name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [c.name for c in CONTENDERS]
    first = rows[0]
    assert first["torch"] == torch.__version__
    assert first["threads"] == str(torch.get_num_threads())
    assert first["command"] == "python benchmarks/run.py densenet --only bc100"
    assert first["alone"] == "python benchmarks/one.py bench_steps:squares '{\"numbers\": 4194304}'"
    assert all(first[name] for name in ("at", "device", "capability", "kernels", "python", "commit"))


def test_peaks_on_a_gpu_are_requested_bytes_over_the_base(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU only the arithmetic can be tested: statistics as torch would give them after each call."""
    calls = iter(
        [
            {"requested_bytes.all.current": 100, "allocated_bytes.all.current": 512},
            {"requested_bytes.all.peak": 700, "allocated_bytes.all.peak": 2048},
            {"requested_bytes.all.peak": 900, "allocated_bytes.all.peak": 2560},
        ]
    )
    steps: list[int] = []
    monkeypatch.setattr(harness, "build", lambda contender: lambda: steps.append(1))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: next(calls))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(harness, "measure", lambda *_, **__: type("M", (), {"saved_bytes": 7}))
    harness.gpu_peaks("x:y", {}, 3)
    assert len(steps) == 3
    assert capsys.readouterr().out == '{"peak": 800, "first_step": 600, "allocated": 2048, "kept": 7}\n'


def test_the_peak_is_the_median_of_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    high_waters = iter([9, 1, 3, 4])

    def child(_: object, steps: int, part: str) -> dict[str, int]:
        if part == "allocations":
            return {"peak_bytes": 2, "saved_bytes": 1}
        return {"process_high_water_bytes": next(high_waters)}

    monkeypatch.setattr(harness, "child", child)
    found = harness.peaks(harness.Contender("a", "x:y"), 5)
    assert found == {"peak": 3, "first_step": 4, "allocated": 2, "kept": 1}
