"""The fused passes behind the lean functions, and the choice of who computes them.

`select(x)` returns the provider for a tensor. `LOWTIDE_KERNELS` asks for one by name; without it the fastest one that
can run is taken. One that was asked for and cannot run is replaced by tensor calls, with one warning that says why.
"""

from __future__ import annotations

import functools
import os
import warnings

from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.kernels.build import BuildError
from lowtide.kernels.interface import Activation, Kernels, Normed
from lowtide.kernels.native import NativeKernels
from lowtide.kernels.tensor_calls import TensorCalls, accumulation_dtype

__all__ = ["Activation", "Kernels", "Normed", "TensorCalls", "accumulation_dtype", "select", "states"]

VARIABLE = "LOWTIDE_KERNELS"
PROVIDERS = ("tensor", "native", "triton")
_TENSOR_CALLS = TensorCalls()
_warned: set[str] = set()


def select(x: Tensor) -> Kernels:
    """The provider that computes the passes for maps like `x` (its device and dtype).

    Raises:
        ArgumentError: `LOWTIDE_KERNELS` names no provider.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in PROVIDERS:
        raise ArgumentError(describe(expected=f"one of {', '.join(PROVIDERS)}", got=repr(asked), where=VARIABLE))
    if asked in ("", "native") and x.device.type == "cpu":
        native = _load_native()
        if isinstance(native, BuildError):
            _warn_once(f"the native kernels cannot be used, tensor calls take their place: {native}")
        elif native.supports(x):
            return native
    return _TENSOR_CALLS


def states() -> dict[str, str]:
    """Provider -> whether it can run here, and why not. Builds the native one if that has not happened yet."""
    native = _load_native()
    unable = isinstance(native, BuildError)
    return {
        "tensor": "available: any device",
        "native": f"not available: {native}" if unable else f"available: CPU, {native.level} instructions",
        "triton": "not available: not offered yet",
    }


@functools.cache
def _load_native() -> NativeKernels | BuildError:
    """The native provider, or why there is none: tried once per process, at the first use."""
    try:
        return NativeKernels()
    except BuildError as error:
        return error


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
