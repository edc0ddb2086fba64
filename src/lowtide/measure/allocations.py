"""Every allocation of a call, from the events that torch's own allocators send to its profiler.

The events come from `c10::Allocator` itself, so internal temporaries of an operator (im2col columns, oneDNN's reordered
weights, FFT work tensors) are in them to the byte; a Python-level tracker of tensors sees none of those. Not in
them: memory that a library takes from malloc by itself (packed GEMM panels, FFT plans) and allocations on the worker
threads of an operator. The process's high-water, measured by `lowtide.measure.child`, has both.

The size of a freed block is looked up by address among the allocations of this call alone: a block from before the
call is not counted when it is freed, so figures are "over what was there before".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.autograd import profiler

from lowtide.errors import UnsupportedError
from lowtide.measure.modules import MARK

Phase = Literal["forward", "backward"]
FORWARD, BACKWARD = "lowtide.forward", "lowtide.backward"
_ENGINE = "autograd::engine::evaluate_function: "


@dataclass(slots=True)
class Allocation:
    """One block. `index` counts the events of the trace; `freed` is the index of its free, None while it is alive.

    `module` is the module that ran, or for the backward of an operator the module whose forward made the node.
    `operator` is the outermost operator or autograd node, and the first operator inside it if it is not an operator
    of torch.
    """

    address: int
    nbytes: int
    index: int
    phase: Phase
    module: str
    operator: str
    freed: int | None = None


@dataclass
class Trace:
    """The allocations of one call in order, and the bytes alive after every event."""

    allocations: list[Allocation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    forward_events: int = 0  # number of events before the forward ended
    start_ns: int = 0
    forward_seconds: float = 0.0  # of the recorded run

    @property
    def peak_index(self) -> int | None:
        """Index of the first event at which the live bytes are largest; None if nothing was allocated."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__) if self.live_bytes else None

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    def alive_after(self, index: int) -> list[Allocation]:
        """Blocks alive just after event `index`, largest first."""
        blocks = [a for a in self.allocations if a.index <= index and (a.freed is None or a.freed > index)]
        return sorted(blocks, key=lambda a: -a.nbytes)

    def alive_after_forward(self) -> list[Allocation]:
        """Blocks that outlive the forward, largest first."""
        return self.alive_after(self.forward_events - 1)


class Recorder:
    """Filled when the `record` block ends."""

    trace: Trace


@contextmanager
def record(device: torch.device) -> Iterator[Recorder]:
    """Record the allocations on `device` inside the block; ranges FORWARD and BACKWARD in it mark the phases.

    Raises:
        UnsupportedError: a profiler is running already (there can be one at a time).
    """
    if torch.autograd._profiler_enabled():
        raise UnsupportedError(
            "lowtide.measure: a torch profiler is running; end it first, only one can record at a time"
        )
    recorder = Recorder()
    with _quiet_kineto():
        run = profiler.profile(profile_memory=True, acc_events=True)
        run.__enter__()
    try:
        yield recorder
    finally:
        with _quiet_kineto():
            run.__exit__(None, None, None)
    assert run.kineto_results is not None, "the profiler has ended"
    recorder.trace = _read(run.kineto_results.experimental_event_tree(), device)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's library from printing its start and stop on stderr; it reads the variable at first use."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")  # above its most severe level
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


@dataclass(slots=True)
class _Place:
    """Where in the tree of profiler events we are."""

    phase: Phase = "forward"
    module: str = ""
    operator: str = ""


def _read(tree: list[Any], device: torch.device) -> Trace:
    events: list[tuple[int, int, int, _Place]] = []  # time, address, signed size, place
    trace = Trace()
    made_by = _modules_of_nodes(tree)
    pending = [(event, _Place()) for event in reversed(tree)]
    forward_end: int | None = None
    while pending:  # a loop: graphs are deeper than Python's recursion limit
        event, place = pending.pop()
        if event.tag.name == "Allocation":
            block = event.extra_fields
            if _same_device(block.device, device):
                events.append((event.start_time_ns, block.ptr, block.alloc_size, place))
            continue
        if event.name == FORWARD:
            trace.start_ns, forward_end = event.start_time_ns, event.end_time_ns
        inner = _enter(event, place, made_by)
        pending += [(child, inner) for child in reversed(event.children)]
    # threads (CUDA's backward) come one after the other in the tree; one thread is in order, and sort is stable
    events.sort(key=lambda item: item[0])
    assert forward_end is not None, "the FORWARD range was recorded"
    trace.forward_seconds = (forward_end - trace.start_ns) * 1e-9
    _replay(events, forward_end, trace)
    return trace


def _replay(events: list[tuple[int, int, int, _Place]], forward_end: int, trace: Trace) -> None:
    alive: dict[int, Allocation] = {}
    live = 0
    for time_ns, address, size, place in events:
        index = len(trace.live_bytes)
        if size > 0:
            block = Allocation(address, size, index, place.phase, place.module, place.operator)
            trace.allocations.append(block)
            alive[address] = block
            live += size
        elif address in alive:
            block = alive.pop(address)
            block.freed = index
            live -= block.nbytes
        else:
            continue
        trace.live_bytes.append(live)
        trace.seconds.append((time_ns - trace.start_ns) * 1e-9)
        trace.forward_events += time_ns <= forward_end


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _enter(event: Any, place: _Place, made_by: dict[int, str]) -> _Place:
    """The place of an event's children."""
    name: str = event.name
    if name in (FORWARD, BACKWARD):
        return place
    if name.startswith(MARK):
        return _Place(place.phase, name.removeprefix(MARK), "")
    if name.startswith(_ENGINE):
        module = made_by.get(event.extra_fields.sequence_number, "")
        node = name.removeprefix(_ENGINE).removeprefix("torch::autograd::")
        return _Place("backward", module, node)
    if not place.operator:
        return _Place(place.phase, place.module, name)
    # an operator of torch says enough; a custom function or a node gets the first operator inside it, not itself again
    if place.operator.startswith("aten::") or " > " in place.operator or not name.startswith("aten::"):
        return place
    return _Place(place.phase, place.module, f"{place.operator} > {name}")


def _modules_of_nodes(tree: list[Any]) -> dict[int, str]:
    """From the number that links an autograd node to its forward operator, to the module that ran then.

    An operator takes the number that the next node will get, whether it makes one or not: the last one with a number
    made the node.
    """
    modules: dict[int, str] = {}
    pending = [(event, "") for event in reversed(tree)]
    while pending:
        event, module = pending.pop()
        if event.tag.name == "Allocation":
            continue
        name: str = event.name
        if name.startswith(MARK):
            module = name.removeprefix(MARK)
        elif (
            event.tag.name == "TorchOp" and event.extra_fields.scope.name == "FUNCTION" and not name.startswith(_ENGINE)
        ):
            number = event.extra_fields.sequence_number
            if number >= 0:
                modules[number] = module
        pending += [(child, module) for child in reversed(event.children)]
    return modules
