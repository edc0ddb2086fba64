"""Which provider computes the passes for a tensor, and why that one.

`LOWTIDE_KERNELS` asks for one by name. Without it the CPU gets the native passes and every other device tensor calls:
the Triton passes have been run in Triton's interpreter alone, never on a GPU, so nobody gets them unasked. A provider
that was asked for and cannot serve a tensor is replaced by tensor calls, with one warning that says why.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.kernels.build import BuildError
from lowtide.kernels.interface import Kernels
from lowtide.kernels.native import NativeKernels
from lowtide.kernels.native_shapes import NativeShapes, is_shapes_only
from lowtide.kernels.tensor_calls import TensorCalls

if TYPE_CHECKING:
    from lowtide.kernels.triton_passes import TritonKernels

VARIABLE = "LOWTIDE_KERNELS"
PROVIDERS = ("tensor", "native", "triton")
_TENSOR_CALLS = TensorCalls()
_warned: set[str] = set()


class Choice(NamedTuple):
    """A provider, why it is this one, and what a user has to be told about it ("" if nothing)."""

    kernels: Kernels
    reason: str
    warning: str = ""


def select(x: Tensor) -> Kernels:
    """The provider that computes the passes for maps like `x` (its device and dtype).

    Raises:
        ArgumentError: `LOWTIDE_KERNELS` names no provider.
    """
    choice = choose(x)
    if choice.warning and choice.warning not in _warned:
        _warned.add(choice.warning)
        warnings.warn(choice.warning, RuntimeWarning, stacklevel=2)
    return choice.kernels


def choose(x: Tensor) -> Choice:
    """As `select`, with the reason and without a warning."""
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in PROVIDERS:
        raise ArgumentError(describe(expected=f"one of {', '.join(PROVIDERS)}", got=repr(asked), where=VARIABLE))
    why = f"{VARIABLE}={asked}" if asked else f"{VARIABLE} is not set"
    if asked == "tensor":
        return Choice(_TENSOR_CALLS, why)
    if not asked and x.device.type != "cpu":
        return Choice(_TENSOR_CALLS, f"{why}: Triton was never run on a GPU, so it has to be asked for")
    name = asked or "native"
    found = _triton_for(x) if name == "triton" else _native_for(x)
    if not isinstance(found, str):
        return Choice(found, why if asked else f"{why}: the fastest that can run")
    # a tensor that is being traced has no memory: unasked, tensor calls are simply what traces
    silent = not asked and not isinstance(_load_native(), BuildError)
    warning = "" if silent else f"the {name} kernels cannot be used, tensor calls take their place: {found}"
    return Choice(_TENSOR_CALLS, f"{why}, but {found}", warning)


def states() -> dict[str, str]:
    """Provider -> whether it can run here, and why not. Builds the native one if that has not happened yet."""
    native, triton = _load_native(), _load_triton()
    unable = isinstance(native, BuildError)
    return {
        "tensor": "available: any device",
        "native": f"not available: {native}" if unable else f"available: CPU, {native.level} instructions",
        "triton": f"not available: {triton}"
        if isinstance(triton, str)
        else f"available if asked for: {triton.where}; passes with a convolution or pool, and streaming: tensor calls",
    }


def _native_for(x: Tensor) -> NativeKernels | str:
    """The native provider, or why it cannot serve `x`."""
    if x.device.type != "cpu":
        return f"they run on the CPU, not on {x.device.type}"
    native = _load_native()
    if isinstance(native, BuildError):
        return str(native)
    provider = NativeShapes(native) if is_shapes_only(x) else native
    return provider if provider.supports(x) else _unlike(x)


def _triton_for(x: Tensor) -> TritonKernels | str:
    """The Triton provider, or why it cannot serve `x`."""
    triton = _load_triton()
    if isinstance(triton, str):
        return triton
    if x.device.type != triton.device_type:
        return f"they run on {triton.where}, not on {x.device.type}"
    if not triton.supports(x):
        return _unlike(x)
    return triton.failure(x.device) or triton


def _unlike(x: Tensor) -> str:
    return f"they take plain float64, float32, bfloat16 and float16 tensors, not {type(x).__name__} of {x.dtype}"


@functools.cache
def _load_native() -> NativeKernels | BuildError:
    """The native provider, or why there is none: tried once per process, at the first use."""
    try:
        return NativeKernels()
    except BuildError as error:
        return error


@functools.cache
def _load_triton() -> TritonKernels | str:
    """The Triton provider, or why there is none."""
    try:
        from lowtide.kernels.triton_passes import TritonKernels
    except ImportError as error:
        return f"{error} (pip install triton)"
    return TritonKernels()
