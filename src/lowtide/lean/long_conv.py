"""The long convolution in little memory: spectra live for a few features at a time; nothing is kept but u and k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.lean.exact_causal import exact_backward, exact_convolve
from lowtide.lean.fft_frames import Frames, Taps, convolve, convolve_backward


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

    Backward: du[s] = sum_j k[j] dy[s+j] + sum_j k_reverse[j] dy[s-j-1] + skip * dy[s];
    dk[j] = sum_{b,t} dy[t] u[t-j];  dk_reverse[j] = sum_{b,t} dy[t] u[t+j+1];  dskip = sum_{b,t} dy[t] u[t].

    Args:
        u: (B, H, L), any floating dtype and strides; half precision is computed in float32.
        k: (H, K) or (C, H, K), any K; taps past L do not matter and get gradient 0.
        skip: (H,) or (C, H).
        k_reverse: as k; tap j has lag -(j+1).
        exact_causal: confine NaN, Inf and the rounding of huge values to the present and the future of the sample that
            brings them (O(log L) times the work). Not with k_reverse.
        tile_bytes: bound for one buffer of a tile; about seven live at once. Default: from the cache and the threads.

    Returns:
        (B, H, L), or (B, C, H, L) for a k with channels, in u's dtype.

    Saved: u, k, k_reverse, skip: B H L itemsize + the parameters; no spectrum.
    Recomputed: the spectra of u and k, tile by tile. One transform of dy serves du and dk.
    Exactness: the plain form's within rounding, in float32 or float64. A second derivative is such a convolution again.
    Source: convolution theorem; overlap-save where the kernel is much shorter than the sequence.
    """
    channels = k.dim() == 3
    if not channels:
        k = k.unsqueeze(0)
        skip = skip if skip is None else skip.unsqueeze(0)
        k_reverse = k_reverse if k_reverse is None else k_reverse.unsqueeze(0)
    if k.shape[-1] == 0:
        k = F.pad(k, (0, 1))
    if k_reverse is not None and (k_reverse.shape[-1] == 0 or u.shape[-1] < 2):
        k_reverse = F.pad(k_reverse, (0, 1))
    y: Any = _LongConv.apply(u, k, skip, k_reverse, exact_causal, tile_bytes)
    return y if channels else y.squeeze(1)


class _LongConv(torch.autograd.Function):
    """(B, H, L), (C, H, K) -> (B, C, H, L)."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        k: Tensor,
        skip: Tensor | None,
        k_reverse: Tensor | None,
        exact: bool,
        tile_bytes: int | None,
    ) -> Tensor:
        ctx.save_for_backward(u, k, skip, k_reverse)
        ctx.exact, ctx.tile_bytes = exact, tile_bytes
        y = u.new_empty(u.shape[0], k.shape[0], *u.shape[1:])
        dtype = _computing_dtype(u, k)
        if exact:
            exact_convolve(u, k, skip, y, dtype)
        else:
            plan = _plan(u, k, k_reverse, dtype, tile_bytes)
            convolve(u, _taps_of(k, k_reverse, dtype), _cast(skip, dtype), y, plan, dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        u, k, skip, k_reverse = ctx.saved_tensors
        need = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiable_backward(u, k, skip, k_reverse, dy, need, ctx.exact, ctx.tile_bytes), None, None
        dtype = _computing_dtype(u, k)
        du = torch.empty_like(u, memory_format=torch.contiguous_format) if need[0] else None
        dk = torch.zeros_like(k, memory_format=torch.contiguous_format) if need[1] else None
        dskip = torch.zeros_like(skip, memory_format=torch.contiguous_format) if need[2] else None
        dk_reverse = torch.zeros_like(k_reverse, memory_format=torch.contiguous_format) if need[3] else None

        def sink(features: slice, forward: Tensor, reverse: Tensor | None) -> None:
            if dk is not None:
                dk[:, features, : forward.shape[-1]].copy_(forward)
            if dk_reverse is not None and reverse is not None:
                dk_reverse[:, features, : reverse.shape[-1]].copy_(reverse)
            if dskip is not None:
                dskip[:, features].copy_(forward[..., 0])

        kernel_sink = sink if any(need[1:4]) else None
        if ctx.exact:
            exact_backward(u, k, skip, dy, du, kernel_sink, dtype)
        else:
            plan = _plan(u, k, k_reverse, dtype, ctx.tile_bytes)
            taps_of = _taps_of(k, k_reverse, dtype)
            convolve_backward(u, taps_of, _cast(skip, dtype), dy, du, kernel_sink, plan, dtype)
        return du, dk, dskip, dk_reverse, None, None


def _computing_dtype(u: Tensor, k: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(u.dtype, k.dtype), torch.float32)


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _plan(u: Tensor, k: Tensor, k_reverse: Tensor | None, dtype: torch.dtype, tile_bytes: int | None) -> Frames:
    R = 0 if k_reverse is None else k_reverse.shape[-1]
    return Frames.plan(u, k.shape[0], k.shape[-1], R, dtype, tile_bytes)


def _taps_of(k: Tensor, k_reverse: Tensor | None, dtype: torch.dtype) -> Any:
    def taps(features: slice) -> Taps:
        return k[:, features].to(dtype), None if k_reverse is None else k_reverse[:, features].to(dtype)

    return taps


def _differentiable_backward(
    u: Tensor,
    k: Tensor,
    skip: Tensor | None,
    k_reverse: Tensor | None,
    dy: Tensor,
    need: tuple[bool, ...],
    exact: bool,
    tile_bytes: int | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients as convolutions that autograd can go through once more."""
    B, H, L = u.shape
    C, _, K = k.shape
    dtype = _computing_dtype(u, k)
    rows = dy.to(dtype).reshape(B, C * H, L)
    du = dk = dskip = dk_reverse = None
    if need[0]:
        first = k[..., :1] if skip is None else k[..., :1] + skip.unsqueeze(-1)
        if exact:
            taps = torch.cat([first, k[..., 1:]], -1).reshape(C * H, K)
            du = long_conv(rows.flip(-1), taps, exact_causal=True).flip(-1)
        else:
            taps = first if k_reverse is None else torch.cat([first, k_reverse], -1)
            du = long_conv(rows, taps.flatten(0, 1), k_reverse=k[..., 1:].flatten(0, 1), tile_bytes=tile_bytes)
        du = du.view(B, C, H, L).sum(1).to(u.dtype)
    wide = u.to(dtype).unsqueeze(1).expand(B, C, H, L).reshape(1, B * C * H, L)
    rows = rows.view(1, B * C * H, L)
    if need[1] or need[2]:
        lags = long_conv(rows.flip(-1), wide[0], tile_bytes=tile_bytes).flip(-1).view(B, C, H, L).sum(0)
        dk = F.pad(lags[..., :K], (0, max(0, K - L))).to(k.dtype) if need[1] else None
        dskip = lags[..., 0].to(skip.dtype) if need[2] and skip is not None else None
    if need[3] and k_reverse is not None:
        R = k_reverse.shape[-1]
        lags = long_conv(wide.flip(-1), rows[0], tile_bytes=tile_bytes).flip(-1).view(B, C, H, L).sum(0)
        dk_reverse = F.pad(lags[..., 1 : R + 1], (0, max(0, R - (L - 1)))).to(k_reverse.dtype)
    return du, dk, dskip, dk_reverse
