"""Batch norm of a sequence that is split over ranks in time: the statistics are those of the whole.

B batch, H features, T positions of this rank, M positions of all ranks that count
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.kernels import accumulation_dtype
from lowtide.lean.batch_norm import Affine, Moments, affine, correction, update_running
from lowtide.parts import BatchNorm

TILE_BYTES = 2 * 2**20


def sequence_norm(x: Tensor, norm: BatchNorm, valid: Tensor | None = None) -> Tensor:
    """y = gamma (x - mean) / sqrt(var + eps) + beta over the positions of all ranks that count; 0 at the others.

    Backward: dx = scale * (dy - sum(dy) / M - xhat * sum(dy xhat) / M), the sums over all ranks; dgamma and dbeta are
    this rank's part.

    Args:
        x: (B, H, T), floating.
        norm: its `reduce` sums over the ranks; running statistics move once, alike on every rank.
        valid: (B, T) bool, False at padding, or None.

    Returns:
        (B, H, T) in x's dtype.

    Saved: x, B H T itemsize, `valid`, and four vectors of H numbers.
    Recomputed: nothing.
    Traffic: one sum of 2H + 1 float64 numbers in the forward, one of 2H in the backward.
    Exactness: torch's batch norm of the joined positions within rounding; sums are taken in float64.
    Raises:
        ArgumentError: fewer than two positions count on all ranks together.
        UnsupportedError: a second derivative.
    Source: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.
    """
    y: Any = _Norm.apply(x, norm.weight, norm.bias, norm, valid)
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: BatchNorm, valid: Tensor | None
    ) -> Tensor:
        batch = _moments(x, norm, valid)
        at = affine(norm, batch, x)
        update_running(norm, batch)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for bs, ts in _tiles(x):
            part = x[bs, :, ts].to(at.scale.dtype) * _column(at.scale) + _column(at.shift)
            y[bs, :, ts] = _masked(part, valid, bs, ts)
        ctx.save_for_backward(x, weight, valid, *at)
        ctx.norm, ctx.count = _constants(norm), batch.size
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            fix = 'use recompute="none"'
            got = "create_graph=True"
            raise UnsupportedError(describe(expected="a first derivative", got=got, where="sequence_norm", fix=fix))
        (dy,) = grads
        x, weight, valid, *vectors = ctx.saved_tensors
        at, need = Affine(*vectors), ctx.needs_input_grad
        sums = x.new_zeros(2, x.shape[1], dtype=torch.float64)
        for bs, ts in _tiles(x):
            dpart = _masked(dy[bs, :, ts].double(), valid, bs, ts)
            sums[0] += dpart.sum((0, 2))
            sums[1] += (dpart * (x[bs, :, ts].double() - _column(at.mean))).sum((0, 2))
        dtype = at.scale.dtype
        found = correction(ctx.norm, at, sums[0].to(dtype), sums[1].to(dtype), ctx.count, need[0])
        dx = None
        if need[0]:
            assert found.slope is not None
            assert found.offset is not None
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for bs, ts in _tiles(x):
                part = dy[bs, :, ts].to(dtype) * _column(at.scale)
                part.addcmul_(x[bs, :, ts].to(dtype), _column(found.slope)).add_(_column(found.offset))
                dx[bs, :, ts] = _masked(part, valid, bs, ts)
        dweight = found.dgamma.to(weight.dtype) if need[1] else None
        return dx, dweight, found.dbeta.to(weight.dtype) if need[2] else None, None, None


def _constants(norm: BatchNorm) -> BatchNorm:
    """What the backward asks of the norm: no tensor."""
    return BatchNorm(None, None, None, None, None, norm.eps, norm.momentum, True, norm.reduce)


def _moments(x: Tensor, norm: BatchNorm, valid: Tensor | None) -> Moments:
    """Of all ranks. E[x^2] - E[x]^2 in float64: exact enough, and one reduction instead of two."""
    H = x.shape[1]
    sums = x.new_zeros(2 * H + 1, dtype=torch.float64)
    for bs, ts in _tiles(x):
        part = _masked(x[bs, :, ts].double(), valid, bs, ts)
        sums[:H] += part.sum((0, 2))
        sums[H:-1] += part.square().sum((0, 2))
    sums[-1] = x.shape[0] * x.shape[2] if valid is None else valid.sum()
    assert norm.reduce is not None
    norm.reduce(sums)
    count = float(sums[-1])
    if count < 2:
        got = f"{count:.0f} on all ranks together"
        raise ArgumentError(describe(expected="more than 1 position that counts", got=got, where="batch norm"))
    mean, square = (sums[:-1] / count).chunk(2)
    dtype = accumulation_dtype(x)
    return Moments(mean.to(dtype), (square - mean.square()).clamp_min(0).to(dtype), count)


def _tiles(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Stretches of one row; a float64 copy of one is in the cache."""
    B, H, T = x.shape
    step = max(1, TILE_BYTES // (8 * max(1, H)))
    for b in range(B):
        for t in range(0, T, step):
            yield slice(b, b + 1), slice(t, min(t + step, T))


def _column(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1)


def _masked(part: Tensor, valid: Tensor | None, bs: slice, ts: slice) -> Tensor:
    return part if valid is None else part.masked_fill(~valid[bs, ts].unsqueeze(1), 0)
