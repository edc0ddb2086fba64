"""Contenders measured side by side: times interleaved in one process, peaks each in a fresh child process.

A contender is a builder `MODULE:FUNCTION` of this folder with keyword arguments; it returns a callable that runs one
step. Ratios are always to the contender marked `baseline` in the same run: this keeps a noisy machine's drift out of
them. On a CUDA device times lie between events and peaks are what tensors requested; on the CPU peaks are a process's.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any, TypedDict

import torch
from rich.console import Console
from rich.table import Table

from lowtide.measure import measure
from lowtide.measure.child import ChildFigures, Part, run_in_child
from lowtide.measure.timing import time_once

HERE = Path(__file__).resolve().parent
MIB = 2**20
PROCESSES = 3
console = Console(width=150)
include_slow = False  # set by the scripts that were asked to


@dataclass(frozen=True)
class Contender:
    """One way to run the same step. `needs`: a package without which it cannot run, which is said and recorded.

    `slow`: takes minutes before its first step (a compiler), so it runs with `--slow` alone, and the tables say so.
    `skip`: why it is not run at this size.
    """

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    needs: str = ""
    slow: bool = False
    skip: str = ""

    @property
    def alone(self) -> str:
        """The command that runs this contender and no other."""
        return shlex.join(
            ["python", "benchmarks/one.py", self.builder, *([json.dumps(self.kwargs)] * bool(self.kwargs))]
        )


NAN = float("nan")


@dataclass
class Figure:
    """What was measured of one contender. Bytes are over the process's base, taken after import, model and input.

    peak_bytes: high-water of a fresh process over `steps` steps, gradients and momentum counted, the median of three
    processes (malloc's holes make single ones differ by a half: docs/log.md); allocated_bytes: the
    exact peak of torch's allocator in another; kept_bytes: what autograd keeps between forward and backward. On a GPU
    peak_bytes is the peak of the bytes that tensors requested, allocated_bytes with the allocator's rounding.
    """

    case: str
    contender: str
    seconds: float = NAN
    seconds_p20: float = NAN
    seconds_p80: float = NAN
    time_ratio: float = NAN
    peak_bytes: int = 0
    peak_first_step_bytes: int = 0
    peak_ratio: float = NAN
    allocated_bytes: int = 0
    allocated_ratio: float = NAN
    kept_bytes: int = 0
    repeats: int = 0
    baseline: bool = False
    note: str = ""  # why there are no figures
    alone: str = ""  # the command that runs this contender and no other


class Peaks(TypedDict):
    """Bytes over the base."""

    peak: int
    first_step: int
    allocated: int
    kept: int


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(contender: Contender) -> Callable[[], object]:
    module, function = contender.builder.split(":")
    return getattr(importlib.import_module(module), function)(**contender.kwargs)


def why_not(contender: Contender) -> str:
    """Why a contender does not run here; "" if it does."""
    if contender.needs and importlib.util.find_spec(contender.needs) is None:
        return f"not installed (pip install {contender.needs.replace('_', '-')})"
    left_out = contender.slow and not include_slow
    return contender.skip or ("left out: compiles for minutes, --slow runs it" if left_out else "")


def times(contenders: list[Contender], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds per step: all contenders take turns, round after round, in an order that rotates."""
    steps = {c.name: build(c) for c in contenders}
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    names, where = list(steps), device()
    for round_index in range(warmup + repeats if names else 0):
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            elapsed = time_once(steps[name], where)
            if round_index >= warmup:
                seconds[name].append(elapsed)
    return seconds


def quantile(values: list[float], q: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def repeated(builder: str, kwargs: dict[str, Any], steps: int) -> Callable[[], object]:
    """A builder itself: `steps` steps as one call, so that a child's high-water covers momentum and malloc's holes."""
    step = build(Contender("", builder, kwargs))

    def call() -> None:
        for _ in range(steps):
            step()

    return call


def child(contender: Contender, steps: int, part: Part) -> ChildFigures:
    kwargs = {"builder": contender.builder, "kwargs": contender.kwargs, "steps": steps}
    return run_in_child("harness:repeated", kwargs, steps=1, parts=[part])


def peaks(contender: Contender, steps: int) -> Peaks:
    """Each figure from a process that did nothing else before; the high-water is the median of `PROCESSES` of them."""
    if device().type == "cuda":
        code = f"import harness; harness.gpu_peaks({contender.builder!r}, {contender.kwargs!r}, {steps})"
        done = subprocess.run([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    exact = child(contender, 2, "allocations")  # the second has the momentum; recording is slow
    return {
        "peak": median_high(child(contender, steps, "process")["process_high_water_bytes"] for _ in range(PROCESSES)),
        "first_step": child(contender, 1, "process")["process_high_water_bytes"],
        "allocated": exact["peak_bytes"],
        "kept": exact["saved_bytes"],
    }


def gpu_peaks(builder: str, kwargs: dict[str, Any], steps: int) -> None:
    """In the child: print what the steps requested of the GPU's memory over what model and input had."""
    step = build(Contender("", builder, kwargs))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats()
    step()
    first = torch.cuda.memory_stats()
    for _ in range(steps - 1):
        step()
    all_steps = torch.cuda.memory_stats()

    def over_base(stats: dict[str, int], kind: str) -> int:
        return stats[f"{kind}_bytes.all.peak"] - base[f"{kind}_bytes.all.current"]

    found: Peaks = {
        "peak": over_base(all_steps, "requested"),
        "first_step": over_base(first, "requested"),
        "allocated": over_base(all_steps, "allocated"),
        "kept": measure(step, repeats=1, device="cuda").saved_bytes,
    }
    print(json.dumps(found))


def run_case(case: str, contenders: list[Contender], *, repeats: int, steps: int = 5) -> list[Figure]:
    """Measure, print and return one figure per contender, also for those that cannot run here."""
    notes = {c.name: why_not(c) for c in contenders}
    present = [c for c in contenders if not notes[c.name]]
    seconds = times(present, repeats)
    figures = []
    for contender in contenders:
        note = notes[contender.name]
        figure = Figure(case, contender.name, baseline=contender.baseline, note=note, alone=contender.alone)
        if not note:
            values = seconds[contender.name]
            figure.seconds, figure.repeats = quantile(values, 0.5), len(values)
            figure.seconds_p20, figure.seconds_p80 = quantile(values, 0.2), quantile(values, 0.8)
            found = peaks(contender, steps)
            figure.peak_bytes, figure.peak_first_step_bytes = found["peak"], found["first_step"]
            figure.allocated_bytes, figure.kept_bytes = found["allocated"], found["kept"]
        figures.append(figure)
    base = next(f for f in figures if f.baseline)
    for figure in figures:
        if not (figure.note or base.note):
            figure.time_ratio = figure.seconds / base.seconds
            figure.peak_ratio = figure.peak_bytes / base.peak_bytes
            figure.allocated_ratio = figure.allocated_bytes / base.allocated_bytes
    show(case, figures)
    console.print(f"baseline: {base.contender}{base.note and ', ' + base.note}; alone: {base.alone}\n", highlight=False)
    return figures


def ratio(value: float, form: str) -> str:
    """A dash where there was no baseline to compare with."""
    return "-" if math.isnan(value) else form.format(value)


def show(case: str, figures: list[Figure]) -> None:
    table = Table(title=case, title_justify="left")
    columns = ("step s", "p20..p80", "time", "peak MiB", "first step", "peak", "allocated MiB", "allocated", "kept MiB")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for f in figures:
        if f.note:
            continue
        table.add_row(
            f.contender + (" (baseline)" if f.baseline else ""),
            f"{f.seconds:.3f}",
            f"{f.seconds_p20:.3f}..{f.seconds_p80:.3f}",
            ratio(f.time_ratio, "{:.2f} x"),
            f"{f.peak_bytes / MIB:.0f}",
            f"{f.peak_first_step_bytes / MIB:.0f}",
            ratio(1 / f.peak_ratio, "1/{:.1f}"),
            f"{f.allocated_bytes / MIB:.0f}",
            ratio(1 / f.allocated_ratio, "1/{:.1f}"),
            f"{f.kept_bytes / MIB:.0f}",
        )
    console.print(table)
    for f in figures:
        if f.note:
            console.print(f"{f.contender}: {f.note}", highlight=False)
