"""A measurement as one HTML page that needs no other file: the numbers, the plot, the holders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lowtide.measure.measurement import Holder, Measurement
from lowtide.measure.timeline import check_output, timeline_figure
from lowtide.measure.units import format_bytes

PAGE_SUFFIXES = (".html", ".htm")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td:first-child { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap } svg { width: 100%;
height: auto } pre { background: #f5f5f5; padding: 1rem; overflow-x: auto }
"""


def html_page(measurement: Measurement, title: str) -> str:
    """The page as a string. Raises MissingDependencyError without matplotlib."""
    drawing = io.StringIO()
    timeline_figure(measurement).savefig(drawing, format="svg")
    svg = drawing.getvalue()
    numbers = str(measurement).split("\n\n")[0]
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><pre>{escape(numbers)}</pre>",
        svg[svg.index("<svg") :],
        "<h2>Kept for backward</h2>", _table(measurement.holders),
        "<h2>Alive at the peak</h2>", _table(measurement.peak_holders),
    ]  # fmt: skip
    if measurement.outside_autograd:
        parts += ["<h2>Alive after the forward, outside autograd</h2>", _table(measurement.outside_autograd)]
    if measurement.operators is not None:
        parts.append(f"<h2>Operators</h2><pre>{escape(str(measurement.operators))}</pre>")
    return "\n".join([*parts, "</body></html>"])


def save_html(measurement: Measurement, title: str, path: Path) -> None:
    """Write the page beside its final name and move it into place.

    Raises:
        ArgumentError: see `check_output`. MissingDependencyError: matplotlib is not installed.
    """
    check_output(path, PAGE_SUFFIXES, "html")
    part = path.with_name(f"{path.name}.part")
    part.write_text(html_page(measurement, title), encoding="utf-8")
    part.replace(path)


def _table(holders: Sequence[Holder], limit: int = 50) -> str:
    rows = ["<table><tr><th>size</th><th>module</th><th>operator</th><th>shape</th><th>kind</th></tr>"]
    for h in holders[:limit]:
        shape = f"{h.shape} {h.dtype}" if h.dtype else ""
        cells = (format_bytes(h.nbytes), h.module, h.operator, shape, h.kind)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    rest = holders[limit:]
    if rest:
        rows.append(f"<tr><td>{format_bytes(sum(h.nbytes for h in rest))}</td><td>in {len(rest)} more</td></tr>")
    return "\n".join([*rows, "</table>"])
