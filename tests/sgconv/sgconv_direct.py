"""Sums written out number by number in float64: what the twins are held against. Shares no code with lowtide."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def position(q: int, r: int, d: int, alignment: str) -> float:
    """Where tap q of a piece of d numbers, stretched r times, reads the piece."""
    if alignment == "half_pixel":
        return min(max((q + 0.5) / r - 0.5, 0.0), d - 1.0)
    if alignment == "align_corners":
        return q * (d - 1) / (d * r - 1) if d * r > 1 else 0.0
    if alignment == "drop_last":
        return q * (d - 1) / (d * r)
    assert alignment == "wrap"
    return q / r


def direct_kernel(pieces: list[Tensor], multiplier: Tensor, decay: Tensor | None, form) -> Tensor:
    """The raw kernel, all taps, (C, H, taps) float64."""
    C, H, d = pieces[0].shape
    S = len(pieces)
    taps = d * 2 ** (S - 1 + form.init_scale)
    kernel = torch.zeros(C, H, taps, dtype=torch.float64)
    start = 0
    for i, piece in enumerate(pieces):
        stretch = 2 ** ((max(0, i - 1) if form.combine == "cat" else i) + form.init_scale)
        weight = (multiplier.double().expand(1, H, 1) if multiplier.dim() else multiplier.double()) ** (S - 1 - i)
        for q in range(d * stretch):
            if form.interpolation == "nearest":
                value = piece[..., q // stretch]
            else:
                x = position(q, stretch, d, form.alignment)
                left = math.floor(x)
                right = (left + 1) % d if form.alignment == "wrap" else min(left + 1, d - 1)
                value = piece[..., left] * (1 - (x - left)) + piece[..., right] * (x - left)
            kernel[..., start + q] += value * (weight[..., 0] if weight.dim() else weight)
        start += d * stretch if form.combine == "cat" else 0
    if decay is not None:
        kernel *= torch.arange(1, taps + 1, dtype=torch.float64) ** -decay.double()[:, None]
    return kernel


def direct_long_conv(u: Tensor, k: Tensor, skip: Tensor | None = None, k_reverse: Tensor | None = None) -> Tensor:
    """y[t] = sum_j k[j] u[t-j] + sum_j k_reverse[j] u[t+j+1] + skip u[t], lag by lag."""
    lead = k.shape[:-1]
    B, H, L = u.shape
    y = torch.zeros(B, *lead, L, dtype=torch.float64)
    wide = u.double().view(B, *(1,) * (len(lead) - 1), H, L)
    for j in range(min(k.shape[-1], L)):
        y[..., j:] += k[..., j : j + 1].double() * wide[..., : L - j]
    if k_reverse is not None:
        for j in range(min(k_reverse.shape[-1], L - 1)):
            y[..., : L - j - 1] += k_reverse[..., j : j + 1].double() * wide[..., j + 1 :]
    if skip is not None:
        y += skip.double()[..., None] * wide
    return y
