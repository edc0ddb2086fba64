"""The providers that every case runs on, and the rule that none is left out in silence."""

from __future__ import annotations

import shutil
import sys

import pytest

from lowtide.kernels.build import BuildError
from lowtide.kernels.native import LEVELS, NativeKernels

PROVIDERS = ["tensor", *(f"native-{level}" for level in LEVELS)]


def make_native(level: str | None = None) -> NativeKernels:
    """The native provider; its absence is a failure where a compiler exists."""
    try:
        kernels = NativeKernels(level)
    except BuildError as error:
        if sys.platform == "linux" and shutil.which("c++"):
            pytest.fail(f"there is a compiler, but the native passes were not built: {error}")
        pytest.skip(f"no native passes here: {error}")
    if level is not None and kernels.level != level:
        pytest.skip(f"this processor has no {level}")
    return kernels
