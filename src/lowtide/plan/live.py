"""Bytes alive during a simulated step: storages followed from birth to death, without memory behind them.

A dispatch mode sees every operator of forward and backward and the storages that come out of it; a weak reference to a
storage tells its death. What an operator allocates and frees inside is not seen here: `lowtide.plan.inside` adds it.

The step is divided into places: each part of the model that has a level is one, and what lies between two of them
another. The parameter that an operator touches says where the step is: a lean block is a single autograd node, and its
operators are inside it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lowtide.plan.inside import Operation, operation
from lowtide.plan.quick import answer

NEAR_BYTES = 2**22
FRESH_BYTES = 2**25  # from here on malloc asks the system each time
START = ""  # the place before the first part with a level
AFTER = "after "  # the place behind a part: this and the part's name


@dataclass(slots=True)
class Stored:
    """One storage; times count operators, `place` is where the step was when it died."""

    nbytes: int
    born: int
    died: int | None = None
    place: str = START


@dataclass
class Work:
    """What a time is made of.

    flops, fused: operations of torch's operators, and of lowtide's native passes. moved, near: bytes read and written
    in main memory, and by calls small enough for a cache. fresh: bytes of new storages too large for the heap, whose
    pages the system has to clear. calls: of operators and passes.
    """

    flops: float = 0.0
    fused: float = 0.0
    moved: float = 0.0
    near: float = 0.0
    fresh: float = 0.0
    calls: float = 0.0


@dataclass
class Recording:
    """Per operator of a step the bytes alive just after it, over parameters, buffers and inputs, and its place."""

    live: list[int] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    kept: list[Stored] = field(default_factory=list)  # alive when the forward had returned
    gradients: list[Stored] = field(default_factory=list)
    inside: list[tuple[int, Operation]] = field(default_factory=list)  # operators that may allocate inside
    work: dict[str, Work] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # places in the order of the forward
    forward_end: int = 0
    random_states: int = 0  # bytes kept in ordinary tensors, which no operator makes; not in `live`


class Recorder(TorchDispatchMode):
    """Fills `recording` while it is active.

    Args:
        parts: id of a parameter -> the part with a level that it belongs to, if it belongs to one.
        before: tensors that are there anyway.
    """

    def __init__(self, mode: FakeTensorMode, parts: Mapping[int, str | None], before: list[Tensor]) -> None:
        super().__init__()
        self._mode = mode
        self.recording = Recording(order=[START], work={START: Work()})
        self._parts = parts
        self._place_of: dict[int, str] = {}
        self._place = START
        self._alive: dict[int, tuple[Any, Stored | None]] = {
            storage._cdata: (weakref.ref(storage), None) for storage in (t.untyped_storage() for t in before)
        }
        self._live = 0
        self._time = 0
        self.weight = 1.0
        self.answers_item = False  # an optimiser asks for the number of its step

    def end_forward(self) -> None:
        self.recording.forward_end = self._time
        self.recording.kept = [stored for _, stored in self._alive.values() if stored is not None]

    def find(self, tensor: Tensor) -> Stored | None:
        """The entry of a tensor's storage, None if it was there before."""
        held = self._alive.get(tensor.untyped_storage()._cdata)
        return None if held is None else held[1]

    def add(self, flops: float, moved: float) -> None:
        """Work of a native pass in the present place, as an `Account` takes it."""
        self.recording.work[self._place].fused += self.weight * flops
        self._add(0.0, moved)

    def _add(self, flops: float, moved: float) -> None:
        work = self.recording.work[self._place]
        work.flops += self.weight * flops
        if moved <= NEAR_BYTES:
            work.near += self.weight * moved
        else:
            work.moved += self.weight * moved
        work.calls += self.weight

    def _answer(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if func is torch.ops.aten.equal.default and not any(isinstance(a, FakeTensor) for a in args):
            with _disable_current_modes():  # states of random generators are ordinary tensors
                return func(*args)
        if self.answers_item and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        for argument in args:
            if id(argument) in self._parts:
                self._go_to(id(argument))
        result = as_on_the_cpu(func, args, answer(self._mode, func, args, kwargs))
        results = [result] if isinstance(result, Tensor) else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for tensor in results:
            self._enter(tensor)
        entry = operation(func, args, kwargs)
        if entry is not None:
            self.recording.inside.append((self._time, entry))
        if not func.is_view:
            self._count(func, args, kwargs, result, results)
        self.recording.live.append(self._live)
        self.recording.places.append(self._place)
        self._time += 1
        return result

    def _go_to(self, parameter: int) -> None:
        place = self._place_of.get(parameter)
        if place is None:
            part = self._parts[parameter]
            order = self.recording.order
            if part is None:
                # what has no level belongs to the gap behind the last part
                place = order[-1] if order[-1] == START or order[-1].startswith(AFTER) else AFTER + order[-1]
            else:
                place = part
            if place not in self.recording.work:
                order.append(place)
                self.recording.work[place] = Work()
            self._place_of[parameter] = place
        self._place = place

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        stored = Stored(storage.nbytes(), self._time)
        self._live += stored.nbytes
        if stored.nbytes >= FRESH_BYTES:
            self.recording.work[self._place].fresh += self.weight * stored.nbytes
        self._alive[key] = (weakref.ref(storage, lambda _: self._leave(key)), stored)

    def _leave(self, key: int) -> None:
        _, stored = self._alive.pop(key)
        if stored is not None:
            self._live -= stored.nbytes
            stored.died, stored.place = self._time, self._place

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, results: list[Tensor]) -> None:
        formula = flop_registry.get(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
        if func._overloadpacket in _TRANSFORMS:
            longest = max((args[0], *results), key=lambda t: t.numel())
            length = math.prod(longest.shape[axis] for axis in args[1])
            flops = 2.5 * longest.numel() * math.log2(max(2, length))
        self._add(flops, sum(_nbytes(t) for t in args if isinstance(t, Tensor)) + sum(_nbytes(t) for t in results))


# without the guard that torch puts around every mode for its compiler, which runs nothing here: 90,000 calls of it
Recorder.__torch_dispatch__ = Recorder._answer  # pyright: ignore


def as_on_the_cpu(func: Any, args: Any, result: Any) -> Any:
    """The result with the memory order and dtypes that the CPU's operator gives it, where the fake one's are others.

    Batch norm of a transposed map answers in plain order, or channels_last: later steps depend on that. Of a map in
    half precision with a float32 weight it keeps moments in float32.
    """
    place = _NORMS.get(func)
    if place is None or result[0] is None or result[0].device.type != "cpu":
        return result
    like, weight = args[place], args[place + 1]
    first, *others = result
    order = torch.contiguous_format
    for dims, channels_last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if like.dim() == dims and not like.is_contiguous() and like.is_contiguous(memory_format=channels_last):
            order = channels_last
    if not first.is_contiguous(memory_format=order):
        first = torch.empty_like(first, memory_format=order)
    if weight is not None and weight.dtype != like.dtype:
        others = [None if t is None else torch.empty_like(t, dtype=weight.dtype) for t in others]
    return (first, *others)


# which argument decides the order of the first result
_NORMS = {torch.ops.aten.native_batch_norm.default: 0, torch.ops.aten.native_batch_norm_backward.default: 1}


_TRANSFORMS = {torch.ops.aten._fft_r2c, torch.ops.aten._fft_c2r, torch.ops.aten._fft_c2c}


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
