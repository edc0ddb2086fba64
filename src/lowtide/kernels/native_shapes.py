"""The native passes on fake tensors: they allocate what the native passes allocate, and compute nothing.

For predicting memory: inside `shapes_only` a fake tensor on the CPU is served by the code of `native`, whose calls into
the compiled library do nothing. What a pass would have read, written and multiplied is told to an `Account`. Loops over
tiles of one kind run a few of them (`alike`): one tile needs the memory that the next one needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.kernels.native import NativeKernels
from lowtide.kernels.native_tasks import DTYPES

T = TypeVar("T")


class Account(Protocol):
    """Adds up work; what is told while `weight` is w counts w times."""

    weight: float

    def add(self, flops: float, moved: float) -> None:
        """Floating-point operations, and bytes read and written, of one pass."""
        ...


_account: ContextVar[Account | None] = ContextVar("account", default=None)
_SIZES = {code: dtype.itemsize for dtype, code in DTYPES.items()}


@contextlib.contextmanager
def shapes_only(account: Account) -> Iterator[None]:
    """Inside, `select` gives fake tensors the provider that would run on ordinary ones."""
    token = _account.set(account)
    try:
        with warnings.catch_warnings():
            # the address of a fake tensor is 0, and torch warns of that
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        _account.reset(token)


def is_shapes_only(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) and _account.get() is not None


def alike(tiles: Iterable[T]) -> Iterator[T]:
    """The tiles of a loop; inside `shapes_only` the first two and the last, the second for all in between.

    For loops whose passes need the same memory, and leave none behind that grows with their number.
    """
    account = _account.get()
    if account is None:
        yield from tiles
        return
    every = list(tiles)
    others = every[1:]
    yield from every[:1]
    if len(others) > 1:
        before, account.weight = account.weight, account.weight * (len(others) - 1)
        try:
            yield others[0]
        finally:
            account.weight = before
    if others:
        yield others[-1]


class NativeShapes(NativeKernels):
    """Provider "native" for fake tensors."""

    def __init__(self, native: NativeKernels) -> None:
        self.__dict__.update(native.__dict__)
        self._library = _NoLibrary()  # pyright: ignore[reportAttributeAccessIssue]

    def supports(self, x: Tensor) -> bool:
        return isinstance(x, FakeTensor) and x.device.type == "cpu" and x.dtype in DTYPES


class _NoLibrary:
    """In place of the compiled library: every function of it gives its task's size to the account."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _give


def _give(reference: Any, *_: Any) -> None:
    account = _account.get()
    if account is not None:
        account.add(*_work(reference._obj))


def _work(task: ctypes.Structure) -> tuple[float, float]:
    """Floating-point operations and bytes of one pass, from the sizes that stand in its task."""
    sizes = {name: getattr(task, name) for name, *_ in task._fields_}
    images = sizes["images"]
    positions = sizes["positions"] if "positions" in sizes else math.prod(sizes["grid"])
    channels = sizes["inputs"] if "inputs" in sizes else sizes["channels"]
    moved = 0.0
    for name in ("x", "y", "grad", "out", "total"):
        held = sizes.get(name)
        if held is not None and held.stride_c + held.stride_s:  # one that is not there has strides 0
            width = sizes["outputs"] if "outputs" in sizes and name in ("y", "grad") else channels
            moved += images * width * positions * _SIZES[held.dtype]
    if "outputs" not in sizes:
        return 8.0 * images * channels * positions, moved
    # a backward is known by its gradient: one product for the input's, one for the weight's
    products = 2 if sizes["grad"].stride_c + sizes["grad"].stride_s else 1
    taps = math.prod(2 * reach + 1 for reach in sizes["reach"])
    return 2.0 * products * images * positions * channels * sizes["outputs"] * taps, moved
