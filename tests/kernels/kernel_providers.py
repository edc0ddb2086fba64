"""The providers that every case runs on, and the rule that none is left out in silence."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch

from lowtide.kernels import Kernels, TensorCalls, select
from lowtide.kernels.build import BuildError
from lowtide.kernels.native import LEVELS, NativeKernels

# set by test_triton.py for a process of its own: there the same cases run in Triton's interpreter, and on nothing else
IN_INTERPRETER = os.environ.get("LOWTIDE_KERNELS") == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
PROVIDERS = ["triton"] if IN_INTERPRETER else ["tensor", *(f"native-{level}" for level in LEVELS)]


def make(provider: str) -> Kernels:
    if provider == "tensor":
        return TensorCalls()
    if provider == "triton":
        kernels = select(torch.zeros(1, 1, 1))
        assert kernels.name == "triton"
        return kernels
    return make_native(provider.removeprefix("native-"))


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
