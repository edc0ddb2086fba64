"""How memory and time of a step grow: against depth and batch of a dense network, against the length of a sequence.

depth: DenseNet-BC, k 12, batch 16, 32x32. batch: DenseNet-BC 40. length: two-sided SGConv layer (1, 16, L).
Memory is the exact peak of torch's allocator over model and input, and what autograd keeps; on a GPU the peak is that
of the requested bytes.
`python benchmarks/plots.py` draws the newest run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness import MIB, console, device, quantile
from rich.table import Table

import densenet
import sgconv
from lowtide.measure import measure
from lowtide.measure.timing import time_once

DENSE_LEVELS = ("none", "pointwise", "layer", "block")
SEQUENCE_LEVELS = ("none", "pointwise", "layer")

# axis -> (where it is varied, levels, builder of a step from a level and a value)
AXES: dict[str, tuple[tuple[int, ...], tuple[str, ...], Callable[[str, int], Callable[[], Any]]]] = {
    "depth": ((22, 40, 58, 76, 100), DENSE_LEVELS, lambda level, x: densenet.bc100(level, batch=16, depth=x)),
    "batch": ((4, 8, 16, 32, 64), DENSE_LEVELS, lambda level, x: densenet.bc100(level, batch=x, depth=40)),
    "length": (tuple(2**i for i in range(12, 20)), SEQUENCE_LEVELS, lambda level, x: sgconv.layer((1, 16, x), level)),
}


@dataclass
class Figure:
    """One point of a curve. Bytes are over model and input, gradients and momentum counted."""

    case: str
    contender: str
    x: int
    seconds: float
    seconds_p20: float
    seconds_p80: float
    peak_bytes: int
    kept_bytes: int
    repeats: int


def point(axis: str, x: int, repeats: int) -> list[Figure]:
    """All levels at one value, timed in turns."""
    _, levels, build = AXES[axis]
    steps = {level: build(level, x) for level in levels}
    memory = {}
    for level, step in steps.items():
        found = measure(step, repeats=1, device=device())
        memory[level] = found.peak_bytes if found.cuda is None else found.cuda.requested_bytes, found.saved_bytes
        step()
    seconds: dict[str, list[float]] = {level: [] for level in levels}
    for _ in range(repeats):
        for level, step in steps.items():
            seconds[level].append(time_once(step, device()))
    figures = []
    for level, values in seconds.items():
        name = "plain" if level == "none" else f"lowtide {level}"
        spread = (quantile(values, q) for q in (0.5, 0.2, 0.8))
        figures.append(Figure(axis, name, x, *spread, *memory[level], repeats))
    return figures


def show(axis: str, figures: list[Figure]) -> None:
    table = Table(title=axis, title_justify="left")
    for column in (axis, "", "step s", "peak MiB", "kept MiB"):
        table.add_column(column, justify="right" if column else "left")
    for f in figures:
        table.add_row(
            str(f.x), f.contender, f"{f.seconds:.4f}", f"{f.peak_bytes / MIB:.1f}", f"{f.kept_bytes / MIB:.1f}"
        )
    console.print(table)


def run(*, quick: bool = False, only: str = "") -> list[Figure]:
    figures: list[Figure] = []
    for axis, (values, _, _) in AXES.items():
        if only not in ("", axis):
            continue
        found = []
        for x in values[:2] if quick else values:
            found += point(axis, x, repeats=1 if quick else 5)
            gc.collect()
        show(axis, found)
        figures += found
    return figures
