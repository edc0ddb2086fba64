"""Batch norm and convolution of a described layer (`lowtide.parts`), in ordinary autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import BatchNorm, Convolution, Reduce


def batch_norm(x: Tensor, norm: BatchNorm) -> Tensor:
    """`torch.nn.BatchNorm*`: running statistics move once per call in training; with `reduce`, those of all ranks."""
    if norm.reduce is not None and norm.uses_batch:
        return _batch_norm_of_ranks(x, norm, norm.reduce)
    momentum = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.uses_batch, momentum or 0.0, norm.eps
    )


def _batch_norm_of_ranks(x: Tensor, norm: BatchNorm, reduce: Reduce) -> Tensor:
    """Mean first, then the mean square distance from it: two sums over the ranks, and two more in the backward."""
    axes = [0, *range(2, x.dim())]
    column = [1, -1] + [1] * (x.dim() - 2)
    count = torch.tensor([float(x.numel() // x.shape[1])], dtype=torch.float64, device=x.device)
    reduce(count)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _sum_over_ranks(wide.sum(axes, dtype=torch.float64), reduce) / count
    centred = wide - mean.to(wide.dtype).view(column)
    var = _sum_over_ranks(centred.square().sum(axes, dtype=torch.float64), reduce) / count
    if norm.training and norm.running_mean is not None and norm.running_var is not None:
        momentum = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(norm.num_batches_tracked)
        unbiased = var.detach() * count / (count - 1)
        norm.running_mean.lerp_(mean.detach().to(norm.running_mean.dtype), momentum or 0.0)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum or 0.0)
    y = centred * (var + norm.eps).rsqrt().to(wide.dtype).view(column)
    if norm.weight is not None:
        y = y * norm.weight.view(column)
    if norm.bias is not None:
        y = y + norm.bias.view(column)
    return y.to(x.dtype)


def _sum_over_ranks(x: Tensor, reduce: Reduce) -> Tensor:
    total: Any = _SumOverRanks.apply(x, reduce)
    return total


class _SumOverRanks(torch.autograd.Function):
    """Its own adjoint: what each rank makes of the sum depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        total = x.clone()
        reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grads[0], ctx.reduce), None  # pyright: ignore[reportReturnType]


def convolve(x: Tensor, conv: Convolution, stride: Sequence[int] | int = 1) -> Tensor:
    """Convolution that keeps the size: zero padding of half the kernel."""
    padding = [size // 2 for size in conv.weight.shape[2:]]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    return function(x, conv.weight, conv.bias, stride, padding)
