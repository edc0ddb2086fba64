"""From the recorded run to the numbers and lists of a `Measurement`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowtide.measure.allocations import Allocation, Trace
from lowtide.measure.measurement import Holder, Measurement, Timeline
from lowtide.measure.recompute import Operators
from lowtide.measure.recorded import MemoryRun
from lowtide.measure.saved import KeptStorage
from lowtide.measure.timing import Timing

TIMELINE_BINS = 2000


def summarize(
    run: MemoryRun, times: tuple[float, ...], operators: Operators | None, repeats: int, device: torch.device
) -> Measurement:
    trace, ledger = run.trace, run.ledger
    peak_index = trace.peak_index
    survivors = trace.alive_after_forward()
    seen = run.visible | {s.address for s in run.kept_after_forward}
    hidden = [a for a in survivors if a.address not in seen]
    holders = tuple(_kept_holders(ledger.at_peak, trace))
    return Measurement(
        saved_bytes=ledger.saved_bytes,
        saved_input_bytes=sum(h.nbytes for h in holders if h.kind == "input"),
        saved_parameter_bytes=ledger.parameter_bytes,
        peak_bytes=trace.peak_bytes if run.cuda is None else run.cuda.allocated_bytes,
        after_forward_bytes=sum(a.nbytes for a in survivors),
        outside_autograd_bytes=sum(a.nbytes for a in hidden),
        timing=Timing(times or (run.seconds,)),
        timed_with_instruments=not times,
        backward=run.backward,
        device=str(device),
        repeats=repeats,
        holders=holders,
        peak_holders=tuple(_block_holders(trace.alive_after(peak_index))) if peak_index is not None else (),
        outside_autograd=tuple(_block_holders(hidden)),
        timeline=_timeline(run),
        cuda=run.cuda,
        operators=operators,
    )


def _block_holders(blocks: Iterable[Allocation]) -> Iterable[Holder]:
    for block in blocks:
        yield Holder(
            block.nbytes,
            block.module,
            f"{block.operator}, in backward" if block.phase == "backward" else block.operator,
        )


def _kept_holders(kept: Iterable[KeptStorage], trace: Trace) -> Iterable[Holder]:
    """Kept storages with the operator that made them; a storage that the call did not allocate was there before."""
    makers: dict[int, Allocation] = {}
    for block in trace.allocations:
        makers[block.address] = block
    makers |= {block.address: block for block in trace.alive_after_forward()}
    for storage in kept:
        if storage.kind == "parameter":
            continue
        maker = makers.get(storage.address)
        kind = "outside" if storage.kind == "made" and maker is None else storage.kind
        operator = maker.operator if maker is not None and kind == "made" else ""
        yield Holder(storage.nbytes, storage.module, operator, kind, storage.shape, storage.dtype)


def _timeline(run: MemoryRun) -> Timeline:
    trace = run.trace
    history = run.ledger.history
    live, kept = _thin(trace.live_bytes), _thin([b for _, b in history])
    return Timeline(
        seconds=tuple(trace.seconds[i] for i in live),
        live_bytes=tuple(trace.live_bytes[i] for i in live),
        kept_seconds=tuple((history[i][0] - trace.start_ns) * 1e-9 for i in kept),
        kept_bytes=tuple(history[i][1] for i in kept),
        forward_end_seconds=trace.forward_seconds,
        peak_seconds=trace.seconds[trace.peak_index] if trace.peak_index is not None else 0.0,
    )


def _thin(values: list[int]) -> list[int]:
    """Indices of the lowest and the highest value in each of `TIMELINE_BINS` runs of events: no peak is lost."""
    count = len(values)
    width = -(-count // TIMELINE_BINS)
    if width <= 2:
        return list(range(count))
    keep = {count - 1}
    for start in range(0, count, width):
        window = range(start, min(start + width, count))
        keep |= {min(window, key=values.__getitem__), max(window, key=values.__getitem__)}
    return sorted(keep)
