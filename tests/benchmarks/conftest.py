"""benchmarks/ is a folder of scripts, not a package: its modules are found as the scripts find them."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
