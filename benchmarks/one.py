"""One contender alone: `python benchmarks/one.py BUILDER [KEYWORDS AS JSON] [--repeats N] [--steps N]`.

    python benchmarks/one.py densenet:bc100 '{"level": "layer"}'

Times in this process, peaks in fresh ones. The command for each row of results/*.csv stands in its column `alone`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Contender, run_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builder", help="MODULE:FUNCTION of benchmarks/")
    parser.add_argument("kwargs", nargs="?", default="{}", type=json.loads)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    contender = Contender(args.builder, args.builder, args.kwargs, baseline=True)
    run_case(json.dumps(args.kwargs), [contender], repeats=args.repeats, steps=args.steps)


if __name__ == "__main__":
    main()
