"""Batch norm as two numbers per channel: z = scale * x + shift, and its backward as an affine correction.

All vectors are (c,), float64 for float64 maps and float32 otherwise.

    forward    scale = gamma * rstd,  shift = beta - mean * scale,  rstd = 1 / sqrt(var + eps)
    backward   with m = dz * relu'(z), B = sum m, G = sum m * (x - mean), M values per channel:
               dbeta = B,  dgamma = G * rstd
               dx = scale * m + slope * x + offset,  slope = -scale * rstd^2 * G / M,
                                                     offset = -scale * B / M - slope * mean
               with frozen statistics slope = offset = 0

Source: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.kernels import Kernels, accumulation_dtype
from lowtide.parts import BatchNorm, Reduce


class Moments(NamedTuple):
    """Mean and biased variance per channel over `size` values."""

    mean: Tensor
    var: Tensor
    size: float


class Affine(NamedTuple):
    """What one batch norm does to a map: scale * x + shift; `mean` and `rstd` serve the backward."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    rstd: Tensor


class Correction(NamedTuple):
    """Backward of one batch norm: parameter gradients (of this rank), and dx = scale * m + slope * x + offset."""

    dgamma: Tensor
    dbeta: Tensor
    slope: Tensor | None
    offset: Tensor | None


def batch_moments(kernels: Kernels, x: Tensor, reduce: Reduce | None) -> Moments:
    """Moments of x (N, c, S). With `reduce` those of all ranks, by one sum over 2c + 1 float64 numbers."""
    count = x.shape[0] * x.shape[2]
    if reduce is None:
        return Moments(*kernels.batch_stats(x), float(count))
    if count:
        mean, var = (v.double() for v in kernels.batch_stats(x))
    else:
        mean = var = x.new_zeros(x.shape[1], dtype=torch.float64)
    # E[x^2] - E[x]^2 in float64: exact enough, and one reduction instead of two
    payload = torch.cat([mean * count, (var + mean * mean) * count, mean.new_tensor([count])])
    reduce(payload)
    total = float(payload[-1])
    mean, square = (payload[:-1] / total).chunk(2)
    dtype = accumulation_dtype(x)
    return Moments(mean.to(dtype), (square - mean * mean).clamp_min(0).to(dtype), total)


def affine(norm: BatchNorm, batch: Moments | None, like: Tensor) -> Affine:
    """scale and shift of `norm` from batch moments, or from its running statistics if it uses those."""
    dtype = accumulation_dtype(like)
    if norm.uses_batch:
        assert batch is not None
        mean, var = batch.mean, batch.var
    else:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, var = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    rstd = (var + norm.eps).rsqrt()
    scale = rstd if norm.weight is None else norm.weight.detach().to(dtype) * rstd
    shift = -mean * scale
    if norm.bias is not None:
        shift += norm.bias.detach().to(dtype)
    return Affine(scale, shift, mean, rstd)


def update_running(norm: BatchNorm, batch: Moments) -> None:
    """Move the running statistics of a norm in training, as `torch.nn.BatchNorm*` does. Called once per forward."""
    if not norm.training or norm.running_mean is None or norm.running_var is None:
        return
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    step = momentum or 0.0
    unbiased = batch.var * (batch.size / (batch.size - 1)) if batch.size > 1 else batch.var
    for running, value in ((norm.running_mean, batch.mean), (norm.running_var, unbiased)):
        # in the vectors' dtype and rounded once: buffers may be half precision
        running.copy_(running.to(value.dtype) * (1 - step) + value * step)


def correction(
    norm: BatchNorm, at: Affine, sums: Tensor, sums_x: Tensor, count: float, needs_input: bool = True
) -> Correction:
    """Backward from B = `sums` and G = `sums_x` of this rank; with `reduce` one sum over 2c numbers."""
    dgamma, dbeta = sums_x * at.rstd, sums
    if not norm.uses_batch or not needs_input:
        return Correction(dgamma, dbeta, None, None)
    if norm.reduce is not None:
        payload = torch.cat([sums, sums_x]).double()
        norm.reduce(payload)
        sums, sums_x = payload.to(sums.dtype).chunk(2)
    slope = at.scale * at.rstd.square() * sums_x / -count
    offset = at.scale * sums / -count - slope * at.mean
    return Correction(dgamma, dbeta, slope, offset)


def check_count(norm: BatchNorm, x: Tensor) -> None:
    """Batch statistics need two values per channel (a process group may bring the others)."""
    if norm.uses_batch and norm.reduce is None and x.shape[0] * x.shape[2:].numel() <= 1:
        raise ArgumentError(
            describe(
                expected="more than 1 value per channel when training",
                got=f"input size {tuple(x.shape)}",
                where="batch norm",
                fix="use a larger batch or larger images",
            )
        )
