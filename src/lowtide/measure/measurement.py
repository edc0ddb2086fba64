"""The result of `lowtide.measure`: what each number means is in its field's comment, and in docs/measure.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.measure.recompute import Operators
from lowtide.measure.timing import Timing
from lowtide.measure.units import format_bytes, format_seconds

Backward = Literal["from the result", "inside fn", "none"]


@dataclass(frozen=True)
class Holder:
    """A block of memory and who holds it.

    `kind`: "made" by the call, "input" (an argument), "outside" (there before the call, but no argument).
    `module` is "" outside of all modules; `operator` made the block, "" if it was there before; `shape` is () if it
    is not known.
    """

    nbytes: int
    module: str
    operator: str
    kind: str = "made"
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Timeline:
    """Bytes alive on the device, over what was there before the call; seconds of the recorded run, which is slow."""

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]
    kept_seconds: tuple[float, ...]
    kept_bytes: tuple[int, ...]
    forward_end_seconds: float
    peak_seconds: float


@dataclass(frozen=True)
class CudaPeaks:
    """Peaks of the CUDA caching allocator over what was there before the call."""

    requested_bytes: int  # what the tensors asked for
    allocated_bytes: int  # rounded up to the allocator's blocks; `torch.cuda.max_memory_allocated`
    reserved_bytes: int  # segments taken from the driver; what another process cannot have


@dataclass(frozen=True)
class Measurement:
    """Memory and time of `fn(*args)` followed by a backward from its result. Bytes are ints, seconds floats.

    str() is a table, to_json() a JSON object of every field.
    """

    saved_bytes: int  # largest live sum of the storages that autograd keeps, each once, parameters and buffers left out
    saved_input_bytes: int  # of these, what lies in the arguments: alive in any case as long as the caller holds them
    saved_parameter_bytes: int  # on top: parameters and buffers that nodes refer to; alive in any case
    peak_bytes: int  # largest sum of bytes allocated by the call: CPU, exact requested bytes; CUDA, allocated bytes
    after_forward_bytes: int  # allocated by the call and alive when the forward has returned, the result among it
    outside_autograd_bytes: int  # of these, neither saved through autograd, nor in the result, nor a gradient
    timing: Timing  # forward and backward of the repeats without instruments
    timed_with_instruments: bool  # True for repeats=1: the only run was the recorded one, its time means little
    backward: Backward
    device: str
    repeats: int
    holders: tuple[Holder, ...]  # the storages whose sum is saved_bytes, largest first
    peak_holders: tuple[Holder, ...]  # what is alive at the peak, largest first
    outside_autograd: tuple[Holder, ...]  # what outside_autograd_bytes consists of, largest first
    timeline: Timeline
    cuda: CudaPeaks | None = None
    operators: Operators | None = None  # with operators=True: what ran again in backward

    @property
    def seconds(self) -> float:
        """Median over the timed repeats."""
        return self.timing.median

    @property
    def seconds_p20(self) -> float:
        return self.timing.p20

    @property
    def seconds_p80(self) -> float:
        return self.timing.p80

    def by_module(self) -> dict[str, int]:
        """Bytes kept for backward per module, largest first, parameters and buffers left out. The sum is
        `saved_bytes`.
        """
        totals: dict[str, int] = {}
        for holder in self.holders:
            totals[holder.module] = totals.get(holder.module, 0) + holder.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        fields |= {"seconds": self.seconds, "seconds_p20": self.seconds_p20, "seconds_p80": self.seconds_p80}
        fields["times"] = fields.pop("timing")["times"]
        return json.dumps(fields)

    def __str__(self) -> str:
        note = ", with instruments on" if self.timed_with_instruments else f", {len(self.timing.times)} repeats"
        rows = [
            ("kept for backward", format_bytes(self.saved_bytes), "by autograd, each storage once"),
            ("  of it inputs", format_bytes(self.saved_input_bytes), "arguments of the call"),
            ("  and parameters", format_bytes(self.saved_parameter_bytes), "on top, alive anyway"),
            ("peak", format_bytes(self.peak_bytes), _peak_note(self)),
            ("alive after forward", format_bytes(self.after_forward_bytes), "allocated by the forward"),
            ("  outside autograd", format_bytes(self.outside_autograd_bytes), "neither saved, result nor gradient"),
            ("time", format_seconds(self.seconds), _time_note(self) + note),
        ]
        if self.cuda is not None:
            rows.insert(4, ("  requested", format_bytes(self.cuda.requested_bytes), "what tensors asked for"))
            rows.insert(5, ("  reserved", format_bytes(self.cuda.reserved_bytes), "taken from the driver"))
        lines = [f"{name:<20} {value:>10}  {meaning}" for name, value, meaning in rows]
        lines += ["", "kept for backward, largest first", *holder_lines(self.holders)]
        lines += ["", "alive at the peak, largest first", *holder_lines(self.peak_holders)]
        if self.outside_autograd:
            lines += ["", "alive after the forward, outside autograd", *holder_lines(self.outside_autograd)]
        if self.operators is not None:
            lines += ["", str(self.operators)]
        return "\n".join(lines)


def _peak_note(m: Measurement) -> str:
    source = "requested from the CPU allocator" if m.cuda is None else "allocated by the CUDA allocator"
    return f"{source}, over what was there before"


def _time_note(m: Measurement) -> str:
    step = {"from the result": "forward + backward", "inside fn": "fn with its backward", "none": "forward only"}[
        m.backward
    ]
    return f"{step}, median (p20 {format_seconds(m.seconds_p20)}, p80 {format_seconds(m.seconds_p80)})"


def holder_lines(holders: Sequence[Holder], limit: int = 10) -> list[str]:
    """One line for each of the largest holders, and one for the rest."""
    lines = []
    for h in holders[:limit]:
        kind = "" if h.kind == "made" else f"[{h.kind}]"
        shape = f"{tuple(h.shape)} {h.dtype.removeprefix('torch.')}" if h.dtype else ""
        lines.append(
            "  " + "  ".join(x for x in (f"{format_bytes(h.nbytes):>10}", h.module, h.operator, shape, kind) if x)
        )
    rest = holders[limit:]
    if rest:
        lines.append(f"  {format_bytes(sum(h.nbytes for h in rest)):>10}  in {len(rest)} more")
    return lines or ["  nothing"]
