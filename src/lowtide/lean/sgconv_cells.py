"""Stretched pieces as rows of cells: on each cell of r taps the kernel is a straight line.

So a piece is written by one product and one sum, and the adjoint is two sums per cell. `align_corners` and `drop_last`
break off the grid of r taps; they are written number by number.

    d numbers per piece, r stretch, n taps to write; leading axes are free
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.sgconv_form import KernelForm


@dataclass(frozen=True)
class Scale:
    """Where piece `index` lies: its stretch, first tap, power of the multiplier; how many of its taps are needed."""

    index: int
    stretch: int
    offset: int
    power: int
    taps: int


def scales(form: KernelForm, length: int) -> list[Scale]:
    """The pieces that reach into the first `length` taps, each cut to what is needed of it."""
    result = []
    for i in range(form.n_scales):
        if form.combine == "cat":
            r = 2 ** (max(0, i - 1) + form.init_scale)
            offset = 0 if i == 0 else form.kernel_dim * r  # as many taps lie before piece i as it has itself
        else:
            r, offset = 2 ** (i + form.init_scale), 0
        taps = min(form.kernel_dim * r, length - offset)
        if taps > 0:
            result.append(Scale(i, r, offset, form.n_scales - 1 - i, taps))
    return result


@dataclass(frozen=True)
class Cells:
    """`m` cells of `width` taps from tap `start` on: tap q of cell j is left_j + ramp_q * (right_j - left_j)."""

    first: int
    m: int
    start: int
    width: int
    ramp: slice

    def view(self, taps: Tensor) -> Tensor:
        return taps[..., self.start : self.start + self.m * self.width].unflatten(-1, (self.m, self.width))


def cells(r: int, lead: int, n: int) -> Iterator[Cells]:
    """Taps 0..n-1 as cells of r taps, the first of which lost its first `lead` taps and the last one those past n."""
    head = min(n, r - lead) if lead else 0
    if head:
        yield Cells(0, 1, 0, head, slice(lead, lead + head))
    first = 1 if lead else 0
    whole = (n - head) // r
    if whole:
        yield Cells(first, whole, head, r, slice(0, r))
    rest = n - head - whole * r
    if rest:
        yield Cells(first + whole, 1, head + whole * r, rest, slice(0, rest))


def ends(piece: Tensor, r: int, form: KernelForm) -> tuple[Tensor, Tensor | None, int, float]:
    """Of a piece's cells: left ends, right ends (None if constant), taps missing from the first, position of tap 0."""
    if form.interpolation == "nearest" or (r == 1 and form.alignment in ("half_pixel", "wrap")):
        return piece, None, 0, 0.0
    if form.alignment == "wrap":
        return piece, piece.roll(-1, -1), 0, 0.0
    padded = torch.cat([piece[..., :1], piece, piece[..., -1:]], -1)
    return padded[..., :-1], padded[..., 1:], r // 2, 0.5


def _ramp(r: int, at: float, like: Tensor) -> Tensor:
    return (torch.arange(r, dtype=torch.float64, device=like.device) + at).div_(r).to(like.dtype)


def _is_regular(form: KernelForm) -> bool:
    return form.interpolation == "nearest" or form.alignment in ("half_pixel", "wrap")


def write_piece(piece: Tensor, scale: Scale, form: KernelForm, out: Tensor, *, add: bool) -> None:
    """out (.., taps) = or += the first taps of the stretched piece (.., d)."""
    if not _is_regular(form):
        left, right, fraction = _irregular(scale, form, piece)
        low = piece.index_select(-1, left)
        low.add_((piece.index_select(-1, right).sub_(low)).mul_(fraction))
        (out.add_ if add else out.copy_)(low)
        return
    low, high, lead, at = ends(piece, scale.stretch, form)
    ramp = None if high is None else _ramp(scale.stretch, at, piece)
    for part in cells(scale.stretch, lead, scale.taps):
        target = part.view(out)
        sel = slice(part.first, part.first + part.m)
        if high is None or ramp is None:
            (target.add_ if add else target.copy_)(low[..., sel, None])
        elif add:
            target.add_((high - low)[..., sel, None] * ramp[part.ramp]).add_(low[..., sel, None])
        else:
            torch.mul((high - low)[..., sel, None], ramp[part.ramp], out=target)
            target.add_(low[..., sel, None])


def piece_gradient(grad: Tensor, d: int, scale: Scale, form: KernelForm) -> Tensor:
    """Adjoint of `write_piece`: (.., taps) -> (.., d)."""
    if not _is_regular(form):
        return _irregular_gradient(grad, d, scale, form)
    lead_shape = grad.shape[:-1]
    probe = grad.new_zeros(*lead_shape, d)
    low, high, lead, at = ends(probe, scale.stretch, form)
    dlow = torch.zeros_like(low)
    dhigh = None if high is None else torch.zeros_like(low)
    ramp = None if high is None else _ramp(scale.stretch, at, grad)
    for part in cells(scale.stretch, lead, scale.taps):
        taps = part.view(grad)
        sel = slice(part.first, part.first + part.m)
        dlow[..., sel] += taps.sum(-1)
        if dhigh is not None and ramp is not None:
            dhigh[..., sel] += (taps * ramp[part.ramp]).sum(-1)
    if dhigh is None:
        return dlow
    dlow -= dhigh
    if form.alignment == "wrap":
        return dlow + dhigh.roll(1, -1)
    dpadded = grad.new_zeros(*lead_shape, d + 2)
    dpadded[..., :-1] += dlow
    dpadded[..., 1:] += dhigh
    dpiece = dpadded[..., 1:-1].clone()
    dpiece[..., 0] += dpadded[..., 0]
    dpiece[..., -1] += dpadded[..., -1]
    return dpiece


def _irregular(scale: Scale, form: KernelForm, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Left and right number and the fraction between them for each tap, where the cells do not fit the taps' grid."""
    d = form.kernel_dim
    intervals = max(1, d * scale.stretch - (1 if form.alignment == "align_corners" else 0))
    steps = torch.arange(scale.taps, device=like.device) * (d - 1)
    left = torch.div(steps, intervals, rounding_mode="floor")
    fraction = (steps - left * intervals).double().div_(intervals).to(like.dtype)
    return left, (left + 1).clamp_(max=d - 1), fraction


def _irregular_gradient(grad: Tensor, d: int, scale: Scale, form: KernelForm) -> Tensor:
    """Sums over the taps of each cell, as differences of a running sum in float64."""
    left, _, fraction = _irregular(scale, form, grad.new_empty((), dtype=torch.float64))
    bounds = torch.searchsorted(left, torch.arange(d + 1, device=grad.device))

    def per_cell(values: Tensor) -> Tensor:
        running = F.pad(values.cumsum(-1), (1, 0))
        return running.index_select(-1, bounds).diff(dim=-1)

    wide = grad.double()
    whole = per_cell(wide)
    upper = per_cell(wide.mul_(fraction) if wide is not grad else wide * fraction)
    result = whole - upper
    result[..., 1:] += upper[..., :-1]  # behind the last number there is no fraction
    return result.to(grad.dtype)
