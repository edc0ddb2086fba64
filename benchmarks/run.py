"""One command for every figure that lowtide quotes.

    python benchmarks/run.py [densenet|sgconv|stream|convert|growth|all] [--quick] [--slow] [--only CASE]

Prints ratios from one interleaved run, writes results/SECTION-HARDWARE-DATE.csv, one row per figure, and puts the
newest figures of every case into README.md (benchmarks/table.py). `--quick` writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import harness  # noqa: E402
import table  # noqa: E402
from machine import file_name, machine, write_csv  # noqa: E402

SECTIONS = ("densenet", "sgconv", "stream", "convert", "growth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="all", choices=(*SECTIONS, "all"))
    parser.add_argument("--quick", action="store_true", help="few repeats: a smoke test, not a figure to quote")
    parser.add_argument("--slow", action="store_true", help="also what compiles for minutes first: torch.compile")
    parser.add_argument("--only", default="", help="one case of the section")
    parser.add_argument("--out", type=Path, default=table.RESULTS)
    args = parser.parse_args()
    harness.include_slow = args.slow
    for section in SECTIONS if args.section == "all" else (args.section,):
        about = machine()
        figures = importlib.import_module(section).run(quick=args.quick, only=args.only)
        if not figures:
            parser.error(f"{section} has no case {args.only!r}")
        if not args.quick:
            command = " ".join(["python", "benchmarks/run.py", *sys.argv[1:]])
            write_csv(args.out / file_name(section, args.only, about), figures, about, command)
    if not args.quick and args.out == table.RESULTS:
        table.update()


if __name__ == "__main__":
    main()
