"""The long convolution, written to be read: one real FFT of everything, ordinary autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def long_conv(
    u: Tensor,
    k: Tensor,
    skip: Tensor | None = None,
    *,
    k_reverse: Tensor | None = None,
    exact_causal: bool = False,
    tile_bytes: int | None = None,
) -> Tensor:
    """y[t] = sum_j k[j] u[t-j] + sum_j k_reverse[j] u[t+j+1] + skip * u[t].

    Args:
        u: (B, H, L), any floating dtype; half precision is computed in float32.
        k: (H, K) or (C, H, K), any K; taps past L do not matter and get gradient 0.
        skip: (H,) or (C, H).
        k_reverse: as k; tap j has lag -(j+1).
        exact_causal: sum directly, lag by lag, so that no sample can touch an earlier output (not even NaN).
        tile_bytes: no meaning here; the lean twin works in tiles.

    Returns:
        (B, H, L), or (B, C, H, L) for a k with channels, in u's dtype.
    """
    del tile_bytes
    channels = k.dim() == 3
    dtype = torch.promote_types(torch.promote_types(u.dtype, k.dtype), torch.float32)
    L = u.shape[-1]
    u_BCHL = u.unsqueeze(1).to(dtype)
    k_CHK = (k if channels else k.unsqueeze(0)).to(dtype)[..., :L]
    if u_BCHL.numel() == 0:
        y = u_BCHL * k_CHK.sum(-1, keepdim=True)  # the transform refuses an empty batch
    elif exact_causal:
        y = _sum_directly(u_BCHL, k_CHK)
    else:
        lags = F.pad(k_CHK, (0, 2 * L - k_CHK.shape[-1]))
        if k_reverse is not None:
            # the last reverse tap that any output needs has lag -(L-1)
            reverse = (k_reverse if channels else k_reverse.unsqueeze(0)).to(dtype)[..., : L - 1]
            lags = lags + F.pad(reverse.flip(-1), (2 * L - reverse.shape[-1], 0))
        spectrum = torch.fft.rfft(u_BCHL, n=2 * L) * torch.fft.rfft(lags, n=2 * L)
        y = torch.fft.irfft(spectrum, n=2 * L)[..., :L]
    if skip is not None:
        y = y + u_BCHL * (skip if channels else skip.unsqueeze(0)).to(dtype).unsqueeze(-1)
    return (y if channels else y.squeeze(1)).to(u.dtype)


def _sum_directly(u_BCHL: Tensor, k_CHK: Tensor) -> Tensor:
    """O(L K) time, without any transform."""
    L = u_BCHL.shape[-1]
    y = u_BCHL * k_CHK[..., :1]
    for lag in range(1, k_CHK.shape[-1]):
        y = y + F.pad(u_BCHL[..., : L - lag] * k_CHK[..., lag : lag + 1], (lag, 0))
    return y
