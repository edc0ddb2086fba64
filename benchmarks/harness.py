"""Contenders measured side by side: times interleaved in one process, peaks each in a fresh child process.

A contender is a builder `benchmarks.MODULE:FUNCTION` with keyword arguments; it returns a callable that runs one step.
Ratios are always to the contender marked `baseline` in the same run: this keeps a noisy machine's drift out of them.
"""

from __future__ import annotations

import csv
import gc
import importlib
import importlib.util
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowtide.measure.child import ChildFigures, Part, run_in_child

HERE = Path(__file__).resolve().parent
MIB = 2**20
console = Console(width=150)


@dataclass(frozen=True)
class Contender:
    """One way to run the same step. `needs`: a package without which it is left out, and said to be."""

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    needs: str = ""


@dataclass
class Figure:
    """What was measured of one contender. Bytes are over the process's base, taken after import, model and input.

    peak_bytes: high-water of a fresh process over `steps` steps, gradients and momentum counted; allocated_bytes: the
    exact peak of torch's allocator in another; kept_bytes: what autograd keeps between forward and backward.
    """

    case: str
    contender: str
    seconds: float
    seconds_p20: float
    seconds_p80: float
    time_ratio: float = float("nan")
    peak_bytes: int = 0
    peak_first_step_bytes: int = 0
    peak_ratio: float = float("nan")
    allocated_bytes: int = 0
    allocated_ratio: float = float("nan")
    kept_bytes: int = 0


def build(contender: Contender) -> Callable[[], object]:
    module, function = contender.builder.split(":")
    return getattr(importlib.import_module(module), function)(**contender.kwargs)


def installed(contenders: list[Contender]) -> list[Contender]:
    kept = []
    for contender in contenders:
        if contender.needs and importlib.util.find_spec(contender.needs) is None:
            console.print(f"left out: {contender.name} (pip install {contender.needs})")
        else:
            kept.append(contender)
    return kept


def times(contenders: list[Contender], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds per step: all contenders take turns, round after round, in an order that rotates."""
    steps = {c.name: build(c) for c in contenders}
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    names = list(steps)
    for round_index in range(warmup + repeats):
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            gc.collect()
            start = time.perf_counter()
            steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_index >= warmup:
                seconds[name].append(time.perf_counter() - start)
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


def run_case(case: str, contenders: list[Contender], *, repeats: int, steps: int = 5) -> list[Figure]:
    contenders = installed(contenders)
    seconds = times(contenders, repeats)
    figures = []
    for contender in contenders:
        values = seconds[contender.name]
        figure = Figure(case, contender.name, quantile(values, 0.5), quantile(values, 0.2), quantile(values, 0.8))
        figure.peak_bytes = child(contender, steps, "process")["process_high_water_bytes"]
        figure.peak_first_step_bytes = child(contender, 1, "process")["process_high_water_bytes"]
        exact = child(contender, 2, "allocations")  # the second has the momentum; recording is slow
        figure.allocated_bytes, figure.kept_bytes = exact["peak_bytes"], exact["saved_bytes"]
        figures.append(figure)
    base = next(f for f, c in zip(figures, contenders, strict=True) if c.baseline)
    for figure in figures:
        figure.time_ratio = figure.seconds / base.seconds
        figure.peak_ratio = figure.peak_bytes / base.peak_bytes
        figure.allocated_ratio = figure.allocated_bytes / base.allocated_bytes
    show(case, figures, base)
    return figures


def show(case: str, figures: list[Figure], base: Figure) -> None:
    table = Table(title=case, title_justify="left")
    columns = ("step s", "p20..p80", "time", "peak MiB", "first step", "peak", "allocated MiB", "allocated", "kept MiB")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for f in figures:
        table.add_row(
            f.contender + (" (baseline)" if f is base else ""),
            f"{f.seconds:.3f}",
            f"{f.seconds_p20:.3f}..{f.seconds_p80:.3f}",
            f"{f.time_ratio:.2f} x",
            f"{f.peak_bytes / MIB:.0f}",
            f"{f.peak_first_step_bytes / MIB:.0f}",
            f"1/{1 / f.peak_ratio:.1f}",
            f"{f.allocated_bytes / MIB:.0f}",
            f"1/{1 / f.allocated_ratio:.1f}",
            f"{f.kept_bytes / MIB:.0f}",
        )
    console.print(table)


def machine() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()} x{os.cpu_count()}"
    return platform.processor() or platform.machine()


def write_csv(path: Path, figures: list[Figure], command: str) -> None:
    """One row per figure, written beside its final name and moved into place."""
    about = machine() | {"command": command}
    beside = path.with_suffix(".csv.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*vars(figures[0]), *about])
        writer.writeheader()
        writer.writerows(vars(f) | about for f in figures)
    os.replace(beside, path)
    console.print(f"wrote {path}")
