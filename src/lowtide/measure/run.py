"""`lowtide.measure`: one recorded run for memory, the rest without instruments for time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import ArgumentError, describe
from lowtide.measure.call import Call, choose_device, differentiable
from lowtide.measure.measurement import Measurement
from lowtide.measure.recompute import OperatorCounter, Operators
from lowtide.measure.recorded import record_memory
from lowtide.measure.state import SavedState, same_random_numbers
from lowtide.measure.summary import summarize
from lowtide.measure.timing import time_once


def measure(
    fn: Callable[..., Any],
    *args: Any,
    repeats: int = 5,
    device: str | torch.device | None = None,
    operators: bool = False,
) -> Measurement:
    """Memory and time of `fn(*args)` and of a backward from what it returns.

    `fn` runs `repeats` times. The first run is recorded (saved tensors, every allocation); it is also the warm-up of
    the others, which are timed without any instrument. Every run starts from the same random state, and gradients,
    buffers and modes of the modules that ran are put back afterwards; parameters and arguments that `fn` itself
    changes are not.

    Args:
        fn: any callable: a module, a function, a whole training step. If it returns tensors with a graph (nested as you
            like), a backward with fixed random gradients follows; if it runs backward itself, that is what is measured.
        args: positional arguments; tensors elsewhere are copied to `device`.
        repeats: runs in all, at least 1. With 1, the time is that of the recorded run and says little.
        device: whose memory is read; None: that of the first argument or parameter, else the CPU.
        operators: one more run, which counts FLOPs and the operators that run again in backward.

    Raises:
        ArgumentError: `repeats` below 1, `fn` not callable, an unknown or absent device.
        UnsupportedError: a device that is neither CPU nor CUDA; a torch profiler is running.
    """
    if not callable(fn):
        raise ArgumentError(describe(expected="fn to be callable", got=type(fn).__name__, where="measure"))
    if not isinstance(repeats, int) or repeats < 1:
        raise ArgumentError(describe(expected="repeats to be an integer >= 1", got=repr(repeats), where="measure"))
    call = Call(fn, args, choose_device(fn, args, device))
    state = SavedState()
    try:
        run = record_memory(call, state)
        times = []
        for _ in range(repeats - 1):
            state.restore()
            times.append(_timed(call, state))
        counted = None
        if operators:
            state.restore()
            counted = count_operators(call, state)
    finally:
        state.restore()
    return summarize(run, tuple(times), counted, repeats, call.device)


def _timed(call: Call, state: SavedState) -> float:
    def step() -> None:
        result = call.forward()
        if differentiable(result):
            state.clear_gradients()
            call.backward(result, reuse_gradients=True)

    with same_random_numbers(call.device):
        return time_once(step, call.device)


def count_operators(call: Call, state: SavedState) -> Operators:
    """One run under a counter of operators."""
    with same_random_numbers(call.device), OperatorCounter() as counter:
        result = call.forward()
        if differentiable(result):
            state.clear_gradients()
            call.backward(result)
    return counter.result()
