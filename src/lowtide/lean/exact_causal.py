"""A causal convolution in which no sample can touch an earlier output, not even by rounding.

One transform of the whole sequence spreads a NaN, an Inf or the rounding of a huge value over all outputs. Here the
sequence is halved again and again: the first half of a block of 2 s reaches the second half through a transform of its
own, 2 s long, and blocks of 32 are summed directly. Every transform's inputs lie before all of its outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.lean.fft_frames import Frames, TapsSink, convolve_backward

DIRECT = 32


def exact_convolve(u_BHL: Tensor, k_CHK: Tensor, skip_CH: Tensor | None, out_BCHL: Tensor, dtype: torch.dtype) -> None:
    """out[b, c, h, t] = sum_{j <= t} k[c, h, j] u[b, h, t - j] + skip[c, h] u[b, h, t]."""
    plan = Frames.plan(u_BHL, k_CHK.shape[0], k_CHK.shape[-1], 0, dtype, None)
    for hs in plan.feature_tiles():
        k = k_CHK[:, hs, : plan.L].to(dtype)
        for bs in plan.batch_tiles():
            u = u_BHL[bs, hs].to(dtype)
            for c in range(plan.C):
                y = _convolve_rows(u, k[c])
                if skip_CH is not None:
                    y += u * skip_CH[c, hs, None].to(dtype)
                out_BCHL[bs, c, hs].copy_(y)


def _convolve_rows(u_bhL: Tensor, k_hK: Tensor) -> Tensor:
    b, h, L = u_bhL.shape
    padded = DIRECT
    while padded < L:
        padded *= 2
    x = u_bhL.new_zeros(b, h, padded)
    x[..., :L] = u_bhL
    y = torch.zeros_like(x)
    _add_directly(x.unflatten(-1, (-1, DIRECT)), k_hK[:, :DIRECT], y.unflatten(-1, (-1, DIRECT)))
    K = k_hK.shape[-1]
    half = DIRECT
    while half < padded:
        reach = min(half, max(2, 1 << (K - 1).bit_length()))  # samples further apart than the kernel's end never meet
        taps = k_hK[:, : 2 * reach]
        pairs = x.unflatten(-1, (-1, 2, half))
        spectrum = torch.fft.rfft(pairs[..., 0, half - reach :], n=2 * reach)
        spectrum *= torch.fft.rfft(taps, n=2 * reach).unsqueeze(1)
        later = torch.fft.irfft(spectrum, n=2 * reach)[..., reach:]
        y.unflatten(-1, (-1, 2, half))[..., 1, :reach] += later
        half *= 2
    return y[..., :L]


def _add_directly(x_bhns: Tensor, k_hK: Tensor, y_bhns: Tensor) -> None:
    """Within blocks, lag by lag: a product with a zero tap would carry a NaN to where the kernel does not reach."""
    for lag in range(k_hK.shape[-1]):
        y_bhns[..., lag:] += x_bhns[..., : x_bhns.shape[-1] - lag] * k_hK[:, None, lag, None]


def exact_backward(
    u_BHL: Tensor,
    k_CHK: Tensor,
    skip_CH: Tensor | None,
    dy_BCHL: Tensor,
    du_BHL: Tensor | None,
    sink: TapsSink | None,
    dtype: torch.dtype,
) -> None:
    """du by the same method on the reversed sequence; dk sums over all time in any case, by one transform."""
    if sink is not None:
        plan = Frames.plan(u_BHL, k_CHK.shape[0], k_CHK.shape[-1], 0, dtype, None)
        convolve_backward(u_BHL, lambda hs: (k_CHK[:, hs].to(dtype), None), None, dy_BCHL, None, sink, plan, dtype)
    if du_BHL is None:
        return
    total = torch.zeros_like(du_BHL, dtype=dtype)
    part = torch.empty_like(total).unsqueeze(1)
    for c in range(k_CHK.shape[0]):
        skip = None if skip_CH is None else skip_CH[c : c + 1]
        exact_convolve(dy_BCHL[:, c].flip(-1), k_CHK[c : c + 1], skip, part, dtype)
        total += part.squeeze(1).flip(-1)
    du_BHL.copy_(total)
