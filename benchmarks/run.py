"""One command for every figure that lowtide quotes.

    python benchmarks/run.py [densenet|sgconv|stream|all] [--quick] [--only CASE]

Prints ratios from one interleaved run and writes results/SECTION-DEVICE-DATE.csv, one row per figure.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import machine, write_csv  # noqa: E402

SECTIONS = ("densenet", "sgconv", "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="all", choices=(*SECTIONS, "all"))
    parser.add_argument("--quick", action="store_true", help="few repeats: a smoke test, not a figure to quote")
    parser.add_argument("--only", default="", help="one case of the section")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    args = parser.parse_args()
    for section in SECTIONS if args.section == "all" else (args.section,):
        figures = importlib.import_module(section).run(quick=args.quick, only=args.only)
        about = machine()
        device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
        name = f"{section}{'-' + args.only if args.only else ''}-{device}-{about['date']}.csv"
        if not args.quick:
            write_csv(args.out / name, figures, " ".join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
