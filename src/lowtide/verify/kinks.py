"""How near a forward comes to its kinks: where a rounding error may turn a gradient on or off.

A ReLU whose input is within rounding of zero has one gradient in one implementation and another in the next, and both
are right. `KinkRecorder` measures, over every kink that the forward meets, the smallest distance to the kink relative
to the RMS of that operator's input. An input of exactly zero is left out: it is the output of an earlier kink, or
padding, and is exactly zero in every precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.verify.report import Margin


class KinkRecorder(TorchDispatchMode):
    """Active around a forward; then `smallest` relative distance, `count` of kink inputs and `where` (the operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = math.inf
        self.count = 0
        self.where = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        distances = _KINKS.get(name)
        x = args[0] if args else None
        if distances is not None and isinstance(x, Tensor) and x.is_floating_point():
            # before the call: the in-place forms overwrite their input
            for distance in distances(args, kwargs or {}):
                self._see(name, distance, x)
        return func(*args, **(kwargs or {}))

    def _see(self, name: str, distance: Tensor, x: Tensor) -> None:
        if distance.numel() == 0:
            return
        self.count += distance.numel()
        rms = float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())
        size = distance.abs()
        nearest = float(size.masked_fill_(size == 0, math.inf).min())
        if rms > 0 and nearest / rms < self.smallest:
            self.smallest, self.where = nearest / rms, name

    def margin(self, dtype: str, phase: str, eps: float) -> Margin:
        """The margin that gradients in a dtype of that `eps` need: 100 eps."""
        return Margin(dtype, phase, self.smallest, 100 * eps, self.count, self.where)


Distances = Callable[[tuple[Any, ...], dict[str, Any]], Iterator[Tensor]]


def _at(*kinks: float) -> Distances:
    def distances(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        x: Tensor = args[0]
        for kink in kinks:
            yield x - kink if kink else x

    return distances


def _at_bounds(lower: float | None, upper: float | None) -> Distances:
    """hardtanh(x, min, max), clamp(x, min, max) and their one-sided forms; bounds may be numbers, tensors or None."""

    def distances(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        given = list(args[1:3])
        names = ("min_val", "max_val") if lower is not None else ("min", "max")
        for i, (name, default) in enumerate(zip(names, (lower, upper), strict=True)):
            bound = given[i] if i < len(given) else kwargs.get(name, default)
            if bound is not None:
                yield args[0] - bound

    return distances


def _at_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """maximum(x, y), gt(x, y): x - y, a tensor or a number."""
    x, *rest = args
    other = rest[0] if rest else kwargs.get("other", 0)
    if not isinstance(other, Tensor) or other.dtype != torch.bool:
        yield x - other


def _max_pool(n: int) -> Distances:
    """The gap between the largest and the second largest value of each window."""

    def distances(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        x, kernel = args[0], _spread(args[1], n)
        stride = _spread(args[2], n) if len(args) > 2 and args[2] else kernel
        padding = _spread(args[3], n) if len(args) > 3 else [0] * n
        dilation = _spread(args[4], n) if len(args) > 4 else [1] * n
        if max(dilation) > 1:
            return
        pads = [p for side in reversed(padding) for p in (side, side)]
        windows = torch.nn.functional.pad(x, pads, value=-math.inf) if any(pads) else x
        for axis in range(n):
            windows = windows.unfold(x.dim() - n + axis, kernel[axis], stride[axis])
        top = windows.flatten(-n).topk(2).values if math.prod(kernel) > 1 else None
        if top is not None:
            yield torch.where(torch.isfinite(top[..., 1]), top[..., 0] - top[..., 1], math.inf)

    return distances


def _max_along(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """amax(x, dim), max(x, dim): the gap between the largest and the second largest."""
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim", [])
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(x.dim()))
    moved = x.movedim([d % x.dim() for d in dims], list(range(-len(dims), 0))).flatten(-len(dims))
    if moved.shape[-1] > 1:
        top = moved.topk(2).values
        yield top[..., 0] - top[..., 1]


def _spread(value: int | list[int], n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


_KINKS: dict[str, Distances] = {
    **dict.fromkeys(("relu", "leaky_relu", "_prelu_kernel", "rrelu_with_noise", "elu", "abs", "sign"), _at(0.0)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), _at(-3.0, 3.0)),
    **dict.fromkeys(("gt", "ge", "lt", "le", "maximum", "minimum", "threshold"), _at_second),
    "hardtanh": _at_bounds(-1.0, 1.0),
    "clamp": _at_bounds(None, None),
    "clamp_min": _at_second,
    "clamp_max": _at_second,
    "max_pool2d_with_indices": _max_pool(2),
    "max_pool3d_with_indices": _max_pool(3),
    "max": _max_along,
    "amax": _max_along,
}
