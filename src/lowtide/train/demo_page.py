"""The demo's figures as one HTML page that needs no other file and no network."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from lowtide import __version__
from lowtide.data.extras import import_extra
from lowtide.measure.units import format_bytes, format_seconds
from lowtide.train.demo import FIRST_STEPS, Comparison, Curve, StepCost
from lowtide.train.files import replacing

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { padding: .2rem 1.2rem .2rem 0; text-align: right; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto }
"""

Row = tuple[str, ...]


def agreement_rows(result: Comparison) -> list[Row]:
    """What differs between the loss curves, and by how much; first row: titles."""
    steps, checked = len(result.plain.losses), len(result.plain_float64.losses)
    d = result.differences()
    first, other = f"first {FIRST_STEPS}", "plain and plain channels-last, float32"
    return [
        ("loss curves", "steps", "largest difference"),
        ("plain and lean, float64", str(checked), f"{d['float64']:.1e}"),
        ("plain and lean, float32", first, f"{d['float32_first_steps']:.1e}"),
        (other, first, f"{d['float32_first_steps_plain_in_another_layout']:.1e}"),
        ("plain and lean, float32", str(steps), f"{d['float32']:.1e}"),
        (other, str(steps), f"{d['float32_plain_in_another_layout']:.1e}"),
    ]


def training_rows(result: Comparison) -> list[Row]:
    """The runs side by side; first row: titles."""

    def row(name: str, curve: Curve, cost: StepCost | None) -> Row:
        memory = format_bytes(cost.peak_bytes) if cost else "-"
        time = format_seconds(curve.seconds_per_step)
        return name, f"{curve.losses[-1]:.4f}", f"{curve.test_error_percent:.2f} %", time, memory

    options = result.options
    return [
        (f"training on {options.data}", "last loss", "test error", "time of a step", "peak memory, batch 64"),
        row("plain", result.plain, result.plain_cost),
        row(f"lean ({options.recompute})", result.lean, result.lean_cost),
        row("plain channels-last", result.other_layout, None),
    ]


def cost_rows(result: Comparison) -> list[Row]:
    """Peak and time of one step by level, with their ratios to plain; first row: titles."""
    plain = result.published_costs[0]
    name = f"one step of BC-{plain.depth}, batch 64 at 32x32"
    rows: list[Row] = [(name, "peak memory", "of plain", "time", "of plain")]
    for cost in result.published_costs:
        assert cost.seconds is not None
        assert plain.seconds is not None
        rows.append(
            (
                "plain" if cost is plain else f"lean ({cost.level})",
                format_bytes(cost.peak_bytes),
                f"{cost.peak_bytes / plain.peak_bytes:.3f}",
                format_seconds(cost.seconds),
                f"{cost.seconds / plain.seconds:.2f}",
            )
        )
    return rows


def save_page(result: Comparison, path: Path) -> None:
    """Write the page beside its final name and move it into place.

    Raises:
        MissingDependencyError: matplotlib is not installed. CheckpointError: the disk is full.
    """
    page = html_page(result)
    with replacing(path) as file:
        file.write(page.encode())


def html_page(result: Comparison) -> str:
    """The page as a string. Raises MissingDependencyError without matplotlib."""
    options = result.options
    depth = f"DenseNet-BC {options.depth}, k {options.growth_rate}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>lowtide demo</title>",
        f"<style>{_STYLE}</style></head><body><h1>The same training in less memory</h1>",
        f"<p>{depth}, data set {escape(options.data)}, {len(result.plain.losses)} steps of {options.batch_size} "
        f"pictures, seed {options.seed}, {result.threads} thread(s), lowtide {__version__}. The plain network keeps "
        "what ordinary autograd keeps; the lean one is the same module with another memory level.</p>",
        _table(training_rows(result)),
        "<h2>Do they compute the same?</h2>",
        "<p>In float64 the two curves agree to rounding. In float32 any change in the order of summation grows with "
        "every step, as training is chaotic: the plain network drifts from itself in the same way when its maps are "
        "merely stored in another order (channels-last).</p>",
        _table(agreement_rows(result)),
        _svg(_curves(result)),
        "<h2>What does it cost?</h2>",
        "<p>The network of the paper. Allocation peak over what was there before the step, and median time of a step; "
        "each figure in a process of its own.</p>",
        _table(cost_rows(result)),
        _svg(_bars(result)),
        "</body></html>",
    ]
    return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    def line(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"


def _new_figure(width: float, height: float, columns: int) -> tuple[Any, Any]:
    figure = import_extra("matplotlib.figure", "matplotlib", "plots").Figure(
        figsize=(width, height), layout="constrained"
    )
    return figure, figure.subplots(1, columns)


def _svg(figure: Any) -> str:
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def _curves(result: Comparison) -> Any:
    figure, (left, right) = _new_figure(10, 3.6, 2)
    left.plot(result.plain.losses, label="plain", linewidth=3, color="tab:gray", alpha=0.6)
    left.plot(result.lean.losses, label=f"lean ({result.options.recompute})", linewidth=1, color="tab:blue")
    left.set(xlabel="step", ylabel="training loss", title="loss")
    left.legend()
    pairs = (
        ("plain and lean, float32", result.plain, result.lean),
        ("plain and plain channels-last, float32", result.plain, result.other_layout),
        ("plain and lean, float64", result.plain_float64, result.lean_float64),
    )
    for label, a, b in pairs:
        # a log axis has no zero: equal losses are drawn at float64's rounding
        apart = [max(abs(x - y), 1e-16) for x, y in zip(a.losses, b.losses, strict=True)]
        right.semilogy(apart, label=label, marker="." if len(apart) < 20 else None)
    right.set(xlabel="step", ylabel="absolute difference of the losses", title="how far apart")
    right.legend(fontsize="small")
    return figure


def _bars(result: Comparison) -> Any:
    figure, (left, right) = _new_figure(10, 3.2, 2)
    costs = result.published_costs
    names = ["plain" if cost.level == "none" else cost.level for cost in costs]
    colours = ["tab:gray"] + ["tab:blue"] * (len(costs) - 1)
    left.bar(names, [cost.peak_bytes / 2**20 for cost in costs], color=colours)
    left.set(ylabel="MiB", title=f"peak memory of a step, BC-{costs[0].depth}")
    right.bar(names, [cost.seconds for cost in costs], color=colours)
    right.set(ylabel="seconds", title=f"time of a step, BC-{costs[0].depth}")
    return figure
