"""Bytes alive over forward and backward, drawn: the peak marked and its largest holders named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import ArgumentError, MissingDependencyError, describe
from lowtide.measure.measurement import Holder, Measurement
from lowtide.measure.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED_HOLDERS = 6
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def timeline_figure(measurement: Measurement) -> Figure:
    """A matplotlib figure of `measurement.timeline`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError('the plot needs matplotlib: pip install "lowtide[plots]"') from error
    line, scale = measurement.timeline, 2.0**20
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Any = figure.subplots()
    for seconds, nbytes, label, color in (
        (line.seconds, line.live_bytes, "allocated", "#20639b"),
        (line.kept_seconds, line.kept_bytes, "kept by autograd", "#3caea3"),
    ):
        axes.step([0.0, *seconds], [0.0, *(b / scale for b in nbytes)], where="post", label=label, color=color)
    axes.axvline(line.forward_end_seconds, color="gray", linestyle=":", label="end of forward")
    peak = max(line.live_bytes, default=0)
    axes.plot([line.peak_seconds], [peak / scale], "v", color="#ed553b", label=f"peak {format_bytes(peak)}")
    names = "\n".join(_label(h) for h in _grouped(measurement.peak_holders)[:NAMED_HOLDERS])
    axes.set_title(f"largest at the peak:\n{names}", loc="left", fontsize=7, family="monospace")
    axes.set_xlabel("seconds of the recorded run (slower than an ordinary one)")
    axes.set_ylabel("MiB over what was there before")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8)
    return figure


def check_output(path: Path, suffixes: tuple[str, ...], where: str) -> None:
    """Complain about a file that could not be written, before the work is done.

    Raises:
        ArgumentError: another suffix, or the folder does not exist.
    """
    if path.suffix not in suffixes:
        raise ArgumentError(describe(expected=f"a file name in {', '.join(suffixes)}", got=str(path), where=where))
    if not path.parent.is_dir():
        raise ArgumentError(describe(expected="an existing folder", got=str(path.parent), where=where))


def save_plot(measurement: Measurement, path: Path) -> None:
    """Write the figure as .png, .svg or .pdf, beside its final name first.

    Raises:
        ArgumentError: see `check_output`. MissingDependencyError: matplotlib is not installed.
    """
    check_output(path, PLOT_SUFFIXES, "plot")
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    timeline_figure(measurement).savefig(part, dpi=150)
    part.replace(path)


def _grouped(holders: tuple[Holder, ...]) -> list[tuple[int, int, str]]:
    """(bytes, blocks, name) per module and operator, largest first: a hundred small maps of one layer are one
    holder.
    """
    groups: dict[str, list[int]] = {}
    for holder in holders:
        name = f"{holder.module} {holder.operator}".strip() or "outside of all operators"
        entry = groups.setdefault(name, [0, 0])
        entry[0] += holder.nbytes
        entry[1] += 1
    return sorted(((size, count, name) for name, (size, count) in groups.items()), reverse=True)


def _label(group: tuple[int, int, str]) -> str:
    size, count, name = group
    return f"{format_bytes(size):>10}  {name}" + (f"  ({count} blocks)" if count > 1 else "")
