"""Streams a kernel of cells at the same small cost for every sample: combs per cell width, joined from the widest down.

A cell of r taps at offset o adds alpha * B_r(t - o) + beta * R_r(t - o), with box and ramp sums of the input

    B_r(t) = sum_{q<r} u(t-q),  R_r(t) = sum_{q<r} q u(t-q)
    B_2r(t) = B_r(t) + B_r(t-r),  R_2r(t) = R_r(t) + R_r(t-r) + r B_r(t-r)

No box is ever built. Each level r = R, R/2, .. 1 forms two combs over its own cells and takes in level 2r (Horner):

    P_r(t) = sum alpha u(t-o) + P_2r(t) + P_2r(t-r) + r Q_2r(t-r)
    Q_r(t) = sum beta  u(t-o) + Q_2r(t) + Q_2r(t-r),        y = P_1

so the state is a ring of inputs and, per level, two delay lines of r numbers: a slot is read and then written at each
sample. Nothing integrates over the past: an error leaves with the sample that brought it.

    B batch, C outputs per channel, H channels, T samples, n cells, K taps. Rings and lines are (slots, B, ..).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide.kernels import stream as native
from lowtide.kernels.native import NativeKernels
from lowtide.lean import stream_ring
from lowtide.lean.stream_cells import CellPlan, kernel_of
from lowtide.stream_state import State


@dataclass(frozen=True)
class CellFilter:
    """What a stream needs of the weights: coefficients (n, 1 or 2, C, H) in the dtype of the arithmetic."""

    plan: CellPlan
    coefficients: Tensor
    fingerprint: int
    offset: Tensor = field(repr=False)
    level_ends: Tensor = field(repr=False)
    cascades: dict[NativeKernels, native.Cascade] = field(default_factory=dict, repr=False, compare=False)

    @property
    def channels(self) -> int:
        return self.coefficients.shape[2]

    @property
    def features(self) -> int:
        return self.coefficients.shape[3]

    @property
    def taps(self) -> int:
        return self.plan.taps

    @property
    def delay(self) -> int:
        return self.plan.delay

    @property
    def dtype(self) -> torch.dtype:
        return self.coefficients.dtype

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {
            "ring": (self.plan.ring_rows, batch, self.features),
            "lines": (self.plan.line_rows, batch, self.channels, self.features),
        }

    def block(self, u: Tensor, state: State) -> Tensor:
        """u (T, B, H), T >= 1 -> y (T, B, C, H), both in the filter's dtype."""
        if u.shape[0] > 1:
            return block(u, state, self)
        if (provider := native.select(u)) is not None:
            return self.cascade(provider)(u, state["ring"], state["lines"], state["position"])
        return step(u[0], state, self).unsqueeze(0)

    def cascade(self, provider: NativeKernels) -> native.Cascade:
        """The native cascade with these coefficients, laid down at the first sample."""
        made = self.cascades.get(provider)
        if made is None:
            made = self.cascades[provider] = native.Cascade(
                provider,
                offsets=self.offset,
                level_ends=self.level_ends,
                coefficients=self.coefficients,
                widest=self.plan.widest,
                ring_rows=self.plan.ring_rows,
                slack=self.plan.slack,
            )
        return made

    def refresh(self, state: State) -> None:
        refresh(state, self)


def step(u: Tensor, state: State, filter: CellFilter) -> Tensor:
    """u (B, H) -> y (B, C, H), both in the filter's dtype, in tensor calls."""
    plan, ring, lines = filter.plan, state["ring"], state["lines"]
    parts = 2 if plan.ramp else 1
    position = state["position"]  # index arithmetic stays on the device: no wait for its value
    ring.index_copy_(0, (position % ring.shape[0]).view(1), u.unsqueeze(0))
    heard = ring.index_select(0, (position - filter.offset) % ring.shape[0])
    weighted = heard[:, None, :, None] * filter.coefficients[:, :, None]
    sizes = [end - begin for begin, end in zip((0, *plan.level_ends[:-1]), plan.level_ends, strict=True)]
    sums = torch.stack([cells.sum(0) for cells in weighted.split(sizes)])  # (levels, parts, B, C, H)
    if len(sizes) > 1:
        widths = torch.tensor([plan.widest >> level for level in range(1, len(sizes))], device=u.device)
        slots = widths - 1 + (position & (widths - 1))
        slots = torch.stack([slots + part * (plan.widest - 1) for part in range(parts)], dim=1)
        delayed = lines[slots]  # (levels - 1, parts, B, C, H)
        if plan.ramp:
            delayed[:, 0].addcmul_(widths.view(-1, 1, 1, 1).to(u.dtype), delayed[:, 1])
        sums[1:] += delayed
        sums = sums.cumsum(0)
        lines[slots] = sums[:-1]
    position += 1
    return sums[-1, 0]


def block(u: Tensor, state: State, filter: CellFilter) -> Tensor:
    """u (T, B, H), any T -> y (T, B, C, H), both in the filter's dtype."""
    T, B, H = u.shape
    t, provider = int(state["position"]), native.select(u)
    if transform_pays(filter.plan, T, min(t, filter.taps - 1), native=provider is not None):
        y = u.new_empty(T, B, filter.channels, H)

        def taps_of(features: slice) -> Tensor:
            return kernel_of(filter.plan, filter.coefficients[..., features])

        stream_ring.convolve(state["ring"], t, u, filter.taps, taps_of, y)
        stream_ring.write(state["ring"], t, u)
        state["position"] += T
        refresh(state, filter)  # the delay lines hold what no ring of inputs does
        return y
    if provider is not None:
        return filter.cascade(provider)(u, state["ring"], state["lines"], state["position"])
    y = u.new_empty(T, B, filter.channels, H)
    for start in range(0, T, filter.plan.slack):
        tile = u[start : start + filter.plan.slack]
        y[start : start + filter.plan.slack] = _short_block(tile, state, filter)
    return y


def _short_block(u: Tensor, state: State, filter: CellFilter) -> Tensor:
    """At most `slack` samples: all of them enter the ring first."""
    plan, ring, lines = filter.plan, state["ring"], state["lines"]
    T, t = u.shape[0], int(state["position"])
    times = torch.arange(t, t + T, device=u.device)
    stream_ring.write(ring, t, u)
    P = u.new_zeros(T, u.shape[1], filter.channels, filter.features)
    Q = torch.zeros_like(P)
    begin = 0
    for level, end in enumerate(plan.level_ends):
        r = plan.widest >> level
        if level > 0:
            P, Q = _take_in(P, Q, r, times, lines, plan)
        if begin < end:
            heard = ring[(times - filter.offset[begin:end, None]) % ring.shape[0]].unsqueeze(3)  # (m, T, B, 1, H)
            alpha = filter.coefficients[begin:end, 0, None, None]
            P += (heard * alpha).sum(0)
            if plan.ramp:
                Q += (heard * filter.coefficients[begin:end, 1, None, None]).sum(0)
        begin = end
    state["position"] += T
    return P


def _take_in(P: Tensor, Q: Tensor, r: int, times: Tensor, lines: Tensor, plan: CellPlan) -> tuple[Tensor, Tensor]:
    """From level 2r to level r, for the samples `times`; the delay lines end up with the last r of them."""
    T = times.shape[0]
    early, late = min(r, T), max(0, T - r)
    slots = r - 1 + (times & (r - 1))
    delayed: list[Tensor] = []
    for part, fresh in enumerate((P, Q) if plan.ramp else (P,)):
        line = lines[part * (plan.widest - 1) :]
        delayed.append(torch.cat([line[slots[:early]], fresh[:late]]))
        line[slots[late:]] = fresh[late:]
    if not plan.ramp:
        return P + delayed[0], Q
    return P + delayed[0] + r * delayed[1], Q + delayed[1]


def transform_pays(plan: CellPlan, samples: int, history: int, *, native: bool) -> bool:
    """Whether one transform is cheaper than the cascade, counted in multiply-adds of the native cascade.

    A transform is taken for 400 of them per sample of history and block, and 40 per tap for the delay lines made anew
    behind it; tensor calls for ten times the native cascade. 400 is what `benchmarks/run.py stream --only block` came
    to on two cores (4,096 taps, 256 channels, blocks of 1000 against one of 65,536); the other two are rough.
    """
    cascade = samples * plan.level_ends[-1] * (2 if plan.ramp else 1) * (1 if native else 10)
    return cascade > 400 * (history + samples) + 40 * plan.taps


def refresh(state: State, filter: CellFilter) -> None:
    """Make the delay lines from the ring alone, as if the whole window had been streamed with these coefficients.

    The line of r numbers needs level 2r at the last r samples, which needs level 4r at the last 3r, and so on: level w
    at the last w - 1 samples, 4 K multiply-adds per channel in all.
    """
    plan, ring, lines = filter.plan, state["ring"], state["lines"]
    state["weights"].fill_(filter.fingerprint)
    t = int(state["position"])
    P = Q = lines.new_zeros(2 * plan.widest - 1, *lines.shape[1:])  # level 2R has no cells
    begin = 0
    for level, end in enumerate(plan.level_ends[:-1]):
        w = plan.widest >> level
        # of level 2w at the last 2w - 1 samples: now and w samples ago
        P, Q = P[w:] + P[: w - 1] + w * Q[: w - 1], Q[w:] + Q[: w - 1]
        for cell in range(begin, end):
            newest = t - int(plan.offset[cell])
            heard = stream_ring.read(ring, newest - (w - 1), newest).unsqueeze(2)
            P.addcmul_(heard, filter.coefficients[cell, 0])
            if plan.ramp:
                Q.addcmul_(heard, filter.coefficients[cell, 1])
        r = w // 2
        slots = r - 1 + (torch.arange(t - r, t, device=ring.device) & (r - 1))
        lines[slots] = P[w - 1 - r :]
        if plan.ramp:
            lines[slots + plan.widest - 1] = Q[w - 1 - r :]
        begin = end
