"""What an operator allocates and frees inside itself: found by running it once, small, on ordinary memory.

oneDNN copies maps into its own layout, a float64 convolution makes columns of nine times its input, a transform that
writes into given memory makes its result beside it first. That depends on the library and the processor, so it is
measured: the operator runs on a few images, at two sizes, and what it took is continued in a straight line. Sizes are
remembered, and only operators that could decide the peak are run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.measure.allocations import FORWARD, record

aten = torch.ops.aten
SMALL_BYTES = 2**24  # of all tensors of a trial run
LARGEST_BYTES = 2**26  # of one that cannot be made smaller

# operator -> its axes that may be shortened together: (argument's place or keyword, axis)
_IMAGES: dict[Any, Sequence[int | str]] = {
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
    aten.native_batch_norm.default: (0,),
    aten.native_batch_norm_backward.default: (0, 1),
    aten.native_group_norm.default: (0,),
    aten._fft_r2c.default: (0,),
    aten._fft_r2c.out: (0, "out"),
    aten._fft_c2r.default: (0,),
    aten._fft_c2r.out: (0, "out"),
    aten._fft_c2c.default: (0,),
    aten._fft_c2c.out: (0, "out"),
}
_NUMBER_OF_IMAGES = {aten.native_group_norm.default: 3}


@dataclass(frozen=True)
class Shape:
    """A tensor without numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cut(self, axis: int, size: int) -> Shape:
        return replace(self, shape=(*self.shape[:axis], size, *self.shape[axis + 1 :]))

    def make(self) -> Tensor:
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).fill_(0.5)
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Operation:
    """One call of an operator, tensors by their shapes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in _shapes((self.args, self.kwargs)))

    def at(self, place: int | str) -> Shape:
        return dict(self.kwargs)[place] if isinstance(place, str) else self.args[place]

    @property
    def axis(self) -> int:
        """The axis that is shortened: the first one with more than one entry that the operator treats alike."""
        first = self.at(_IMAGES[self.func][0])
        transformed = {d % len(first.shape) for d in self.args[1]} if "fft" in self.func.name() else {1, 2, 3, 4}
        axes = [d for d in range(len(first.shape)) if d not in transformed]
        return next((d for d in axes if first.shape[d] > 1), axes[0] if axes else 0)

    @property
    def images(self) -> int:
        return self.at(_IMAGES[self.func][0]).shape[self.axis]

    def with_images(self, count: int) -> Operation:
        axis = self.axis
        args, kwargs = list(self.args), dict(self.kwargs)
        for place in _IMAGES[self.func]:
            if isinstance(place, str):
                kwargs[place] = kwargs[place].cut(axis, count)
            else:
                args[place] = args[place].cut(axis, count)
        if self.func in _NUMBER_OF_IMAGES:
            args[_NUMBER_OF_IMAGES[self.func]] = count
        return Operation(self.func, tuple(args), tuple(kwargs.items()))

    @property
    def most_bytes(self) -> int:
        """More than the operator takes inside: columns of a 3x3x3 convolution at worst, else two copies of all."""
        columns = self.func in (aten.convolution.default, aten.convolution_backward.default)
        half_or_double = self.args[0].dtype != torch.float32
        return (28 if columns and half_or_double else 3) * self.nbytes


def operation(func: Any, args: Any, kwargs: Any) -> Operation | None:
    """The call as an `Operation`, None for an operator that allocates its results alone, or is not on the CPU."""
    if func not in _IMAGES or args[0].device.type != "cpu":
        return None
    args, kwargs = tree_map(_shape_of, (tuple(args), dict(kwargs)))
    return Operation(func, _hashable(args), tuple((name, _hashable(value)) for name, value in kwargs.items()))


def inside_bytes(call: Operation) -> int:
    """Bytes that the operator holds at most beside its arguments and results."""
    images = call.images
    per_image = max(1, call.nbytes // max(1, images))
    most = max(1, SMALL_BYTES // per_image)
    if images <= most:
        return _measured(call)
    if per_image > LARGEST_BYTES:
        return call.nbytes  # too large to be tried: a copy of every argument
    low, high = max(1, most // 2), max(2, most)
    at_low, at_high = _measured(call.with_images(low)), _measured(call.with_images(high))
    return max(0, at_low + (at_high - at_low) * (images - low) // (high - low))


@functools.lru_cache(maxsize=4096)
def _measured(call: Operation) -> int:
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(_make, (call.args, dict(call.kwargs)))
        with record(torch.device("cpu")) as recorder, record_function(FORWARD):
            result = call.func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
    return max(0, recorder.trace.peak_bytes - sum(n for key, n in made.items() if key not in given))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shape_of(value: Any) -> Any:
    return Shape(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _make(value: Any) -> Any:
    return value.make() if isinstance(value, Shape) else value


def _shapes(tree: Any) -> list[Shape]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Shape)]


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value


InsideBytes = Callable[[Operation], int]
