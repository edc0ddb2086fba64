"""Whether a run of the whole suite exercised every kernel provider that can run on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence, Set
from itertools import product
from pathlib import Path

NATIVE = [f"tests/kernels/{name}.py::" for name in ("test_parity", "test_mix", "test_conv", "test_pool")]
# instruction sets that the passes are compiled for -> what a processor must have for them
LEVELS = {
    "DEFAULT": set[str](),
    "AVX2": {"avx2", "fma", "f16c"},
    "AVX512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
}
TRITON = "tests/kernels/test_triton.py::test_parity_in_the_interpreter["


def has_compiler() -> bool:
    return sys.platform == "linux" and shutil.which(os.environ.get("CXX", "c++")) is not None


def levels_here() -> list[str]:
    """The instruction sets of this processor."""
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else set[str]()
    return [level for level, needed in LEVELS.items() if needed <= flags]


def not_exercised(passed: Set[str], *, compiler: bool, linux: bool, levels: Sequence[str]) -> list[str]:
    """What is missing among the ids of the tests that passed, one line each."""
    missing = []
    for file, level in product(NATIVE, levels) if compiler else ():
        if not any(test.startswith(file) and f"[native-{level}" in test for test in passed):
            missing.append(f"there is a C++ compiler, but no case of {file[:-2]} passed on the native kernels, {level}")
    if linux and not any(test.startswith(TRITON) for test in passed):
        missing.append("no parity case passed on the Triton kernels in Triton's interpreter (pip install triton)")
    return missing
