"""Draw the newest results/growth-*.csv: `python benchmarks/plots.py [--csv FILE] [--out docs/growth.svg]`.

Peak memory, memory kept for backward and time of a step against depth, batch and length, on logarithmic axes, where
a power law is a straight line: the legend gives the exponent of the last stretch. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
from pathlib import Path
from typing import Any

from table import RESULTS, ROOT, Row

MIB = 2**20
QUANTITIES = {
    "peak_bytes": ("peak, MiB", MIB),
    "kept_bytes": ("kept for backward, MiB", MIB),
    "seconds": ("step, s", 1),
}
COLOURS = {"plain": "#777777", "lowtide pointwise": "#1f6fb4", "lowtide layer": "#d9730d", "lowtide block": "#2a8f4c"}


def newest(results: Path) -> Path:
    """The growth file with all cases whose rows are the latest."""
    files = sorted(results.glob("growth-*.csv"))
    if not files:
        raise SystemExit("nothing to draw: python benchmarks/run.py growth")
    return max(files, key=lambda path: rows_of(path)[0]["at"])


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def exponent(xs: list[int], ys: list[float]) -> float:
    """Of the power law through the last two points."""
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


def curves(rows: list[Row], case: str, quantity: str) -> dict[str, tuple[list[int], list[float]]]:
    """Contender -> (values of x, values of y)."""
    scale = QUANTITIES[quantity][1]
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        if row["case"] == case:
            xs, ys = found.setdefault(row["contender"], ([], []))
            xs.append(int(row["x"]))
            ys.append(float(row[quantity]) / scale)
    return found


def draw(path: Path) -> Any:
    """The figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(path)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    size = (4 * len(cases), 3 * len(QUANTITIES))
    figure, axes = pyplot.subplots(len(QUANTITIES), len(cases), figsize=size, squeeze=False, layout="constrained")
    for line, (quantity, (label, _)) in zip(axes, QUANTITIES.items(), strict=True):
        for plot, case in zip(line, cases, strict=True):
            ticks: list[int] = []
            for name, (xs, ys) in curves(rows, case, quantity).items():
                power = f"{name}: {case}^{exponent(xs, ys):.2f}"
                plot.loglog(xs, ys, marker="o", markersize=3, color=COLOURS[name], label=power)
                ticks = xs
            plot.set_xticks(ticks, [str(x) for x in ticks], rotation=45 if ticks[-1] > 9999 else 0)
            plot.minorticks_off()
            plot.set_xlabel(case)
            plot.set_ylabel(label)
            plot.grid(alpha=0.3)
            plot.legend(fontsize=7)
    first = rows[0]
    figure.suptitle(
        f"{first['device']}, {first['threads']} threads, torch {first['torch']}, {first['at'][:10]}, commit "
        f"{first['commit']}",
        fontsize=8,
    )
    return figure


def source(path: Path) -> str:
    """What the drawing says it was made from: a drawing of other numbers is found out by it."""
    return f"{path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="default: the newest of results/")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "growth.svg")
    args = parser.parse_args()
    path = args.csv or newest(RESULTS)
    figure = draw(path)
    import matplotlib

    # no date and no random names inside: the same numbers give the same file
    with matplotlib.rc_context({"svg.hashsalt": "lowtide", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Description": source(path)} if args.out.suffix == ".svg" else None
        beside = args.out.with_name(f"{args.out.stem}.part{args.out.suffix}")
        figure.savefig(beside, metadata=metadata)
        beside.replace(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
