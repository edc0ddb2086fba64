"""Whether a run of the whole suite exercised every kernel provider that can run on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Set

NATIVE = [f"tests/kernels/{name}.py::" for name in ("test_parity", "test_mix", "test_conv")]
TRITON = "tests/kernels/test_triton.py::test_parity_in_the_interpreter["


def has_compiler() -> bool:
    return sys.platform == "linux" and shutil.which(os.environ.get("CXX", "c++")) is not None


def not_exercised(passed: Set[str], *, compiler: bool, linux: bool) -> list[str]:
    """What is missing among the ids of the tests that passed, one line each."""
    missing = []
    for file in NATIVE if compiler else ():
        if not any(test.startswith(file) and "[native-" in test for test in passed):
            missing.append(f"there is a C++ compiler, but no case of {file[:-2]} passed on the native kernels")
    if linux and not any(test.startswith(TRITON) for test in passed):
        missing.append("no parity case passed on the Triton kernels in Triton's interpreter (pip install triton)")
    return missing
