"""The recorded run: one call under saved-tensor hooks, module names and the allocator's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from lowtide.measure.allocations import BACKWARD, FORWARD, Trace, record
from lowtide.measure.call import Call, differentiable, surroundings, tensors_in
from lowtide.measure.measurement import Backward, CudaPeaks
from lowtide.measure.modules import ModuleTracker
from lowtide.measure.saved import KeptStorage, Ledger, storages_of
from lowtide.measure.state import SavedState, leaves_of, same_random_numbers
from lowtide.measure.timing import time_once


@dataclass
class MemoryRun:
    """What one recorded run saw."""

    trace: Trace
    ledger: Ledger
    kept_after_forward: list[KeptStorage]
    visible: set[int]  # addresses of the result and of gradients when the forward had returned
    backward: Backward
    seconds: float
    cuda: CudaPeaks | None


@dataclass
class _AfterForward:
    """Taken between forward and backward."""

    kept: list[KeptStorage]
    visible: set[int]
    has_graph: bool


def record_memory(call: Call, state: SavedState) -> MemoryRun:
    """Run once with saved-tensor hooks, module names and the allocator's events."""

    def add_root(module: nn.Module) -> None:
        state.add_module(module)
        ledger.add_module(module)

    tracker = ModuleTracker(add_root)
    ledger = Ledger(tracker, call.argument_tensors)
    for thing in surroundings(call.fn, call.args):
        if isinstance(thing, nn.Module):
            tracker.add_root(thing)
        elif isinstance(thing, Tensor):
            state.add_leaves([thing])
    between: list[_AfterForward] = []

    def step() -> None:
        with record_function(FORWARD):
            result = call.forward()
        between.append(_after_forward(result, ledger, state))
        if between[0].has_graph:
            state.add_leaves(leaves_of(differentiable(result)))
            state.clear_gradients()
            with record_function(BACKWARD):
                call.backward(result)

    before = _cuda_before(call.device)
    with same_random_numbers(call.device), record(call.device) as recorder, tracker.active(), ledger.hooks():
        seconds = time_once(step, call.device)
    ledger.keep_peak()
    trace, after = recorder.trace, between[0]
    inside = any(a.phase == "backward" for a in trace.allocations)
    backward: Backward = "from the result" if after.has_graph else "inside fn" if inside else "none"
    peaks = _cuda_peaks(call.device, before)
    return MemoryRun(trace, ledger, after.kept, after.visible, backward, seconds, peaks)


def _after_forward(result: Any, ledger: Ledger, state: SavedState) -> _AfterForward:
    seen = (*tensors_in(result), *state.gradients())
    visible = {storage.data_ptr() for tensor in seen for _, storage in storages_of(tensor)}
    return _AfterForward(ledger.kept_now(), visible, bool(differentiable(result)))


_CUDA_FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes")


def _cuda_before(device: torch.device) -> dict[str, int] | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # segments that earlier calls left reserved would hide the growth of `reserved`
    torch.cuda.reset_peak_memory_stats(device)
    stats = torch.cuda.memory_stats(device)
    return {name: stats[f"{name}.all.current"] for name in _CUDA_FIGURES}


def _cuda_peaks(device: torch.device, before: dict[str, int] | None) -> CudaPeaks | None:
    if before is None:
        return None
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return CudaPeaks(*(stats[f"{name}.all.peak"] - before[name] for name in _CUDA_FIGURES))
