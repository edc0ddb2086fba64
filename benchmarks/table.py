"""The tables of the documents, made from results/*.csv: `python benchmarks/table.py` rewrites, `--check` compares.

README.md and docs/benchmarks.md hold pairs of lines `<!-- benchmarks: SECTION -->` and `<!-- end -->`; what lies
between them is made here. For every case of a section the newest run counts, whatever file it is in. Ratios are those
of the run.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import CASES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MIB = 2**20
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, str]


def newest_cases(section: str, results: Path) -> dict[str, list[Row]]:
    """Case -> the rows of its newest run, cases in the order of run.py."""
    cases: dict[str, list[Row]] = {}
    for path in sorted(results.glob(f"{section}-*.csv"), key=lambda path: place(path, section)):
        found: dict[str, list[Row]] = {}
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if "case" not in (reader.fieldnames or ()):
                continue  # of another script: results/convert-parity-*.csv
            for row in reader:
                found.setdefault(row["case"], []).append(row | {"file": path.name})
        for case, rows in found.items():
            if case not in cases or rows[0]["at"] >= cases[case][0]["at"]:
                cases[case] = rows
    return cases


def place(path: Path, section: str) -> tuple[int, str]:
    """Where a file's cases stand in a section; of one name the older file comes first."""
    names = CASES.get(section, ())
    at = next((i for i, name in enumerate(names) if path.name.startswith(f"{section}-{name}-")), len(names))
    return at, path.name


def section_text(section: str, results: Path) -> str:
    """Everything between the two marks."""
    cases = newest_cases(section, results)
    if not cases:
        return f"\nNothing measured yet: `python benchmarks/run.py {section}`.\n\n"
    make = token_table if section == "stream" else step_table
    return "\n" + "\n".join(make(case, rows) for case, rows in cases.items()) + "\n"


def caption(case: str, rows: list[Row], unit: str) -> str:
    first = rows[0]
    return (
        f"**{case}**, {unit}; {first['device']}, {first['threads']} threads, torch {first['torch']}, "
        f"{first['kernels']} kernels, {first['at'][:10]}, commit {first['commit']} ([rows](results/{first['file']}))\n"
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def step_table(case: str, rows: list[Row]) -> str:
    """Time and memory of a step; ratios to the baseline, which is the row with two ones."""
    lines = []
    for row in rows:
        if row.get("note"):
            lines.append([row["contender"], row["note"], "", "", ""])
            continue
        time, peak, allocated = (float(row[f"{name}_ratio"]) for name in ("time", "peak", "allocated"))
        spread = f"{float(row['seconds_p20']):.3g} to {float(row['seconds_p80']):.3g}"
        lines.append(
            [
                row["contender"] + (" (baseline)" if row.get("baseline") == "True" else ""),
                f"{float(row['seconds']):.3g} s ({spread})",
                "-" if math.isnan(time) else f"{time:.2f}",
                f"{int(row['peak_bytes']) / MIB:.0f} MiB, {share(peak)}",
                f"{int(row['allocated_bytes']) / MIB:.0f} MiB, {share(allocated)}",
                f"{int(row['kept_bytes']) / MIB:.0f} MiB",
            ]
        )
    lines = [line + [""] * (6 - len(line)) for line in lines]
    header = ["", "step (20th to 80th percentile)", "time", "peak", "allocated", "kept"]
    unit = f"{rows[0]['repeats']} steps each in turns"
    return caption(case, rows, unit) + "\n" + markdown(header, lines)


def share(ratio: float) -> str:
    if math.isnan(ratio):  # no baseline here
        return "-"
    return "1" if ratio == 1 else f"1/{1 / ratio:.1f}" if ratio < 1 else f"{ratio:.2f}"


def token_table(case: str, rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratio = float(row["direct_ratio"])
        times = (seconds(float(row[f"{name}_seconds"])) for name in ("median", "p99", "worst", "mean"))
        state = f"{int(row['state_bytes']) / MIB:.1f} MiB"
        lines.append([row["contender"], *times, "" if ratio != ratio else f"{ratio:.3g}", state])
    header = ["", "median", "p99", "worst", "mean", "direct / median", "state"]
    return caption(case, rows, "time of a sample") + "\n" + markdown(header, lines)


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def with_tables(document: Path, results: Path = RESULTS) -> str:
    """The document's text with every block made anew; links to results/ are from where it lies."""
    up = "../" * (len(document.relative_to(results.parent).parts) - 1)

    def made(found: re.Match[str]) -> str:
        return found[1] + section_text(found[2], results).replace("](results/", f"]({up}results/") + found[3]

    return BLOCK.sub(made, document.read_text())


def update(documents: tuple[Path, ...] = DOCUMENTS, results: Path = RESULTS) -> None:
    for document in documents:
        beside = document.with_suffix(".md.part")
        beside.write_text(with_tables(document, results))
        beside.replace(document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if README.md is not up to date"
    )
    if not parser.parse_args().check:
        update()
    stale = [path.name for path in DOCUMENTS if path.read_text() != with_tables(path)]
    if stale:
        sys.exit(f"the tables of {' and '.join(stale)} are not those of results/*.csv; run python benchmarks/table.py")


if __name__ == "__main__":
    main()
