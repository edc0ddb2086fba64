"""The fused passes behind the lean functions, and the choice of who computes them.

`select(x)` returns the provider for a tensor. `LOWTIDE_KERNELS` asks for one by name; without it the fastest one that
can run is taken. One that was asked for and cannot run is replaced by tensor calls, with one warning that says why.
"""

from __future__ import annotations

import os

from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.kernels.interface import Activation, Kernels
from lowtide.kernels.tensor_calls import TensorCalls, accumulation_dtype

__all__ = ["Activation", "Kernels", "TensorCalls", "accumulation_dtype", "select"]

VARIABLE = "LOWTIDE_KERNELS"
PROVIDERS = ("tensor", "native", "triton")
_TENSOR_CALLS = TensorCalls()


def select(x: Tensor) -> Kernels:
    """The provider that computes the passes for maps like `x` (its device and dtype).

    Raises:
        ArgumentError: `LOWTIDE_KERNELS` names no provider.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in PROVIDERS:
        raise ArgumentError(describe(expected=f"one of {', '.join(PROVIDERS)}", got=repr(asked), where=VARIABLE))
    return _TENSOR_CALLS
