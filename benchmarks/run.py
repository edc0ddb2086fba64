"""One command for every figure that lowtide quotes.

    python benchmarks/run.py [densenet|sgconv|stream|convert|growth|all] [--quick] [--slow] [--only CASE]

Prints ratios from one interleaved run, writes results/SECTION-HARDWARE-DATE.csv, one row per figure, and puts the
newest figures of every case into README.md (benchmarks/table.py). `--quick` writes nothing. Exit codes: 0 done, 1 a
step failed, 2 something was asked for that is not there, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

# named here, so that a wrong name is told before anything heavy is imported
CASES = {
    "densenet": ("bc100", "densenet121", "3d"),
    "sgconv": ("conv4k", "conv64k", "conv1m", "layer"),
    "stream": ("token", "block", "apply"),
    "convert": ("resnet50", "unet", "unet-simple", "densenet121", "3d"),
    "growth": ("depth", "batch", "length"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage above it."""
        self.exit(2, f"error: {message}\n")


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="all", choices=(*CASES, "all"))
    parser.add_argument("--quick", action="store_true", help="few repeats: a smoke test, not a figure to quote")
    parser.add_argument("--slow", action="store_true", help="also what compiles for minutes first: torch.compile")
    parser.add_argument(
        "--only", default="", help="one case; without a section, of every section that has one so named"
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "results", help="the folder of the CSV files")
    args = parser.parse_args()
    asked = tuple(CASES) if args.section == "all" else (args.section,)
    sections = [section for section in asked if args.only in ("", *CASES[section])]
    if not sections:
        there = "; ".join(f"{section}: {', '.join(CASES[section])}" for section in asked)
        parser.error(f"{args.section} has no case {args.only!r}; expected one of {there}")
    if not args.quick:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {args.out} is not a folder to write to: {error.strerror}")
    done: list[str] = []
    try:
        run(sections, args, done)
    except KeyboardInterrupt:
        kept = f"written: {', '.join(done)}" if done else "nothing was written"
        print(f"\nstopped in {sections[len(done)]}: {kept}", file=sys.stderr)
        return 130
    return 0


def run(sections: Iterable[str], args: argparse.Namespace, done: list[str]) -> None:
    """Section after section; `done` gets the name of each that was measured and written."""
    import harness
    import table
    from machine import file_name, machine, write_csv

    from lowtide.errors import LowtideError

    harness.include_slow = args.slow
    for section in sections:
        about = machine()
        try:
            figures = importlib.import_module(section).run(quick=args.quick, only=args.only)
        except LowtideError as error:
            sys.exit(f"error: {section}: {error}")
        if not args.quick:
            command = " ".join(["python", "benchmarks/run.py", *sys.argv[1:]])
            write_csv(args.out / file_name(section, args.only, about), figures, about, command)
            if args.out == table.RESULTS:
                table.update()
        done.append(section)


if __name__ == "__main__":
    sys.exit(main())
