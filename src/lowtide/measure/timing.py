"""Seconds per call: the median, the 20th and the 80th percentile."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of every timed repeat, in order, and their 20th, 50th and 80th percentiles."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return self._percentile(50)

    @property
    def p20(self) -> float:
        return self._percentile(20)

    @property
    def p80(self) -> float:
        return self._percentile(80)

    def _percentile(self, q: float) -> float:
        return float(np.percentile(self.times, q))


def time_once(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one `step()`: between two events on a CUDA device, by the wall clock on the CPU.

    Garbage of earlier repeats is collected before, so that it is not collected during.
    """
    gc.collect()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def time_interleaved(
    steps: Sequence[Callable[[], object]], *, repeats: int, device: str | torch.device = "cpu", warmup: int = 1
) -> list[Timing]:
    """Time several steps against each other: one of each in turn, so that a slow minute of the machine hits all alike.

    Args:
        steps: what to time. The ratio of two medians of one such run is what a comparison should quote.
        repeats: timed rounds. warmup: rounds before them that are not timed.
    """
    where = torch.device(device)
    for _ in range(warmup):
        for step in steps:
            step()
    rounds = [[time_once(step, where) for step in steps] for _ in range(repeats)]
    return [Timing(tuple(column)) for column in zip(*rounds, strict=True)]
