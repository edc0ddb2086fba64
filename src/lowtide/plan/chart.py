"""Peak and predicted time of every level, drawn beside the budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import MissingDependencyError
from lowtide.measure.timeline import PLOT_SUFFIXES, check_output
from lowtide.measure.units import format_bytes
from lowtide.plan.result import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_figure(plan: Plan) -> Figure:
    """A matplotlib figure: a bar per level, the chosen levels last where they are a mixture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('the plot needs matplotlib: pip install "lowtide[plots]"') from error
    rows = [(p.level, p.peak_bytes, p.relative_time) for p in plan.at_levels]
    if plan.level == "mixed":
        rows.append(("mixed", plan.predicted_peak_bytes, plan.relative_time))
    names = [f"{name} (chosen)" if name == plan.level else name for name, _, _ in rows]
    figure = Figure(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    peaks = axes[0].barh(names, [peak / 2**20 for _, peak, _ in rows], color="#20639b")
    axes[0].bar_label(peaks, [format_bytes(peak) for _, peak, _ in rows], padding=3, fontsize=8)
    axes[0].axvline(plan.budget_bytes / 2**20, color="#ed553b", label=f"budget {format_bytes(plan.budget_bytes)}")
    axes[0].set_xlabel(f"MiB at the peak of a step, batch {plan.batch}")
    axes[0].margins(x=0.25)
    axes[0].legend(loc="lower right", fontsize=8)
    axes[0].invert_yaxis()
    times = axes[1].barh(names, [time for _, _, time in rows], color="#3caea3")
    axes[1].bar_label(times, [f"{time:.2f}" for _, _, time in rows], padding=3, fontsize=8)
    axes[1].set_xlabel('predicted time of a step, "none" = 1')
    axes[1].margins(x=0.15)
    return figure


def save_chart(plan: Plan, path: Path) -> None:
    """Write the figure as .png, .svg or .pdf, beside its final name first.

    Raises:
        ArgumentError: see `check_output`. MissingDependencyError: matplotlib is not installed.
    """
    check_output(path, PLOT_SUFFIXES, "plot")
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    plan_figure(plan).savefig(part, dpi=150)
    part.replace(path)
