"""A piecewise linear kernel as cells: taps q = 0..r-1 behind an offset, r a power of two, tap q = alpha + q * beta.

The plan (offsets, widths, which two numbers of the pieces a cell lies between) depends on the form alone; the
coefficients alpha and beta are linear in the pieces. Every alignment has its plan: where a stretched piece breaks off
the grid of r taps (align_corners, drop_last), the run between two breaks is cut into powers of two; it costs about
twice the cells and stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.sgconv_form import KernelForm

# numbers of state per channel, over the number of taps: 1 for the inputs themselves, the rest for delay lines and slack
STATE_PER_TAP = 1.05
MAX_SLACK = 64


@dataclass(frozen=True)
class Run:
    """Taps of the kernel on a line: tap first + q is v[left] + (at + q * slope) * (v[right] - v[left]).

    v are the numbers of all pieces, scale behind scale, already weighted.
    """

    first: int
    taps: int
    left: int
    right: int
    at: float = 0.0
    slope: float = 0.0

    def part(self, start: int, taps: int) -> Run:
        return replace(self, first=self.first + start, taps=taps, at=self.at + self.slope * start)

    def mirrored(self, last: int, numbers: int) -> Run:
        """The run at taps last - first, last - first - 1, ..; its numbers lie `numbers` further in v."""
        return Run(
            last - self.first - self.taps + 1,
            self.taps,
            self.left + numbers,
            self.right + numbers,
            self.at + self.slope * (self.taps - 1),
            -self.slope,
        )


@dataclass(frozen=True)
class CellPlan:
    """Cells from the widest down, and the sizes of the state that streams them.

    taps K (twice the kernel's when two-sided), delay; widest R; ramp: whether any beta can differ from 0; slack: how
    many samples may enter the ring before the first of them is processed; level_ends[i]: cells of width >= R / 2^i.
    """

    taps: int
    delay: int
    widest: int
    ramp: bool
    slack: int
    level_ends: tuple[int, ...]
    offset: Tensor
    left: Tensor
    right: Tensor
    at: Tensor
    slope: Tensor

    @property
    def ring_rows(self) -> int:
        """K - 1 past samples and `slack` new ones."""
        return self.taps - 1 + self.slack

    @property
    def line_rows(self) -> int:
        """A delay line of r numbers for each level r = 1, 2, .. R / 2, for the box part and for the ramp part."""
        return (2 if self.ramp else 1) * (self.widest - 1)

    def state_numbers(self, channels: int) -> int:
        """Numbers of state per input channel that has `channels` outputs."""
        return self.ring_rows + channels * self.line_rows


@lru_cache(maxsize=64)
def cell_plan(form: KernelForm, channels: int, bidirectional: bool = False) -> CellPlan:
    """The cells of `form` with a skip term (its number is the last one of v), for `channels` outputs per input.

    The widest cells are cut until all delay lines fit into 5 % of the taps; a kernel of few numbers per scale then
    costs some more cells: about 40 at most for each of the widest scales.
    """
    runs = list(kernel_runs(form))
    taps, delay, numbers = form.taps, 0, form.n_scales * form.kernel_dim
    if bidirectional:
        runs = [replace(run, first=run.first + taps) for run in runs] + [
            run.mirrored(taps - 1, numbers) for run in runs
        ]
        taps, delay, numbers = 2 * taps, taps, 2 * numbers
    runs.append(Run(delay, 1, numbers, numbers))  # the skip term
    ramp = any(run.slope != 0 and run.taps > 1 for run in runs)
    slack = max(1, min(MAX_SLACK, taps // 64))
    spare = int(STATE_PER_TAP * taps) - (taps - 1 + slack)
    per_tap = channels * (2 if ramp else 1)
    widest = 1
    while 2 * widest <= max(run.taps for run in runs) and per_tap * (2 * widest - 1) <= spare:
        widest *= 2
    cells = sorted(
        (cell for run in runs for cell in powers_of_two(run, widest)), key=lambda cell: (-cell.taps, cell.first)
    )
    widths = [widest >> level for level in range(widest.bit_length())]
    return CellPlan(
        taps,
        delay,
        widest,
        ramp,
        slack,
        tuple(sum(cell.taps >= width for cell in cells) for width in widths),
        torch.tensor([cell.first for cell in cells]),
        torch.tensor([cell.left for cell in cells]),
        torch.tensor([cell.right for cell in cells]),
        torch.tensor([cell.at for cell in cells], dtype=torch.float64),
        # the slope of a single tap is never used: R_1 = 0
        torch.tensor([cell.slope if cell.taps > 1 else 0.0 for cell in cells], dtype=torch.float64),
    )


def powers_of_two(run: Run, widest: int) -> Iterator[Run]:
    """`run` cut into cells whose widths are powers of two, at most `widest`."""
    start = 0
    while start < run.taps:
        width = min(widest, 1 << ((run.taps - start).bit_length() - 1))
        yield run.part(start, width)
        start += width


def kernel_runs(form: KernelForm) -> Iterator[Run]:
    """The straight runs of the whole kernel; number m of scale i is v[i * kernel_dim + m]."""
    d = form.kernel_dim
    start = 0
    for scale in range(form.n_scales):
        r = 2 ** ((max(0, scale - 1) if form.combine == "cat" else scale) + form.init_scale)
        for run in piece_runs(d, r, form):
            yield replace(run, first=run.first + start, left=run.left + scale * d, right=run.right + scale * d)
        start += d * r if form.combine == "cat" else 0


def piece_runs(d: int, r: int, form: KernelForm) -> Iterator[Run]:
    """The straight runs of one piece of d numbers, stretched r times; in whole numbers, so that no break is misplaced.

    Tap q reads the piece at position (num q + shift) / den.
    """
    taps = d * r
    if form.interpolation == "nearest":
        yield from (Run(m * r, r, m, m) for m in range(d))
        return
    if form.alignment == "half_pixel":
        num, shift, den = 2, 1 - r, 2 * r
        if r > 1:
            yield Run(0, r // 2, 0, 0)
    elif form.alignment == "wrap":
        num, shift, den = 1, 0, r
    elif form.alignment == "align_corners":
        num, shift, den = d - 1, 0, taps - 1
    else:
        num, shift, den = d - 1, 0, taps
    if num == 0:  # one number: constant
        yield Run(0, taps, 0, 0)
        return
    for m in range(d):
        first = max(0, -((shift - m * den) // num))  # the first tap at position >= m
        behind = min(taps, -((shift - (m + 1) * den) // num))
        if first < behind:
            # behind the last number: back to the first one, or level
            right = m + 1 if m + 1 < d else 0 if form.alignment == "wrap" else m
            slope = 0.0 if right == m else num / den
            at = 0.0 if right == m else (num * first + shift - m * den) / den
            yield Run(first, behind - first, m, right, at, slope)


def weighted_numbers(
    pieces: Sequence[Tensor], multiplier: Tensor, norm: Tensor | None, skip: Tensor | None, bidirectional: bool
) -> Tensor:
    """v (C, H, n) in float64: the numbers of all scales, weighted and over the norm, reverse ones behind, skip last."""
    scales = len(pieces)
    weight = multiplier.double()
    v = torch.cat([piece.double() * weight ** (scales - 1 - i) for i, piece in enumerate(pieces)], dim=-1)
    if norm is not None:
        v = v / norm.double()
    if bidirectional:
        v = torch.cat(v.chunk(2), dim=-1)
    last = v.new_zeros(v.shape[:2]) if skip is None else skip.double()
    return torch.cat([v, last.unsqueeze(-1)], dim=-1)


def coefficients(plan: CellPlan, v: Tensor) -> Tensor:
    """(cells, 1 or 2, C, H): alpha, and beta if the plan has ramps, from the weighted numbers v (C, H, n)."""
    v_nCH = v.permute(2, 0, 1)
    left = v_nCH[plan.left.to(v.device)]
    rise = v_nCH[plan.right.to(v.device)] - left
    at, slope = (x.to(v.device, v.dtype)[:, None, None] for x in (plan.at, plan.slope))
    alpha = left + at * rise
    return torch.stack([alpha, slope * rise], dim=1) if plan.ramp else alpha.unsqueeze(1)


def kernel_of(plan: CellPlan, coefficients: Tensor) -> Tensor:
    """The taps (C, H, K) that the cells describe."""
    kernel = coefficients.new_zeros(plan.taps, *coefficients.shape[2:])
    begin = 0
    for level, end in enumerate(plan.level_ends):
        width = plan.widest >> level
        q = torch.arange(width, device=kernel.device, dtype=kernel.dtype)[:, None, None]
        for offset, numbers in zip(plan.offset[begin:end].tolist(), coefficients[begin:end], strict=True):
            taps = kernel[offset : offset + width]
            taps += numbers[0]
            if plan.ramp and width > 1:
                taps.addcmul_(q, numbers[1])
        begin = end
    return kernel.permute(1, 2, 0)
