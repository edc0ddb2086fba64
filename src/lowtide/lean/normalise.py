"""A norm as one autograd node that keeps its input and the statistics, and marks its output with how it was made.

Source: Ioffe and Szegedy 2015, arXiv 1502.03167; Ulyanov et al. 2016, arXiv 1607.08022; Wu and He 2018, arXiv
1803.08494.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.lean.autocast import autocast_dtype
from lowtide.lean.remade import FixedNorm, Made, as_group_norm_reads, base_of, frozen_copy, group_norm, mark, rows
from lowtide.lean.segment import refuse_double_backward
from lowtide.parts import BatchNorm
from lowtide.steps import GroupNorm, InstanceNorm, Norm


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """x (N, c, *S) normalised; running statistics move once in training."""
    if isinstance(norm, InstanceNorm) and not norm.uses_images:
        # with frozen statistics the image no longer matters
        norm = BatchNorm(norm.weight, norm.bias, norm.running_mean, norm.running_var, eps=norm.eps, training=False)
    dtype = autocast_dtype(type(norm), x, None if norm.weight is None else norm.weight.dtype) or x.dtype
    found: list[FixedNorm] = []
    z = _Norm.apply(x, norm.weight, norm.bias, norm, dtype, found)
    if z.requires_grad:
        mark(z, Made(base_of(x), found[0]))
    return z


def _statistics(x: Tensor, norm: Norm, dtype: torch.dtype) -> tuple[FixedNorm, Tensor]:
    """The norm with the statistics of x, and z. Moves the running ones."""
    if isinstance(norm, GroupNorm):
        z, mean, rstd = group_norm(x, norm)
        return FixedNorm(frozen_copy(norm), mean, rstd, dtype), z
    if isinstance(norm, BatchNorm):
        fixed = FixedNorm(frozen_copy(norm), *_batch_statistics(x, norm), dtype)
    else:
        fixed = FixedNorm(frozen_copy(norm), *_instance_statistics(x, norm), dtype)
    return fixed, fixed(x)


def _batch_statistics(x: Tensor, norm: BatchNorm) -> tuple[Tensor, Tensor]:
    if norm.reduce is not None:
        raise UnsupportedError(
            describe(expected="statistics of one process", got="a process group", where="norm_act_conv")
        )
    if not norm.uses_batch:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return norm.running_mean, norm.running_var
    _check_count(x.shape[0] * x.shape[2:].numel(), x)
    momentum = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    running = (norm.running_mean, norm.running_var) if norm.training else (None, None)
    return _moments(x, norm.weight, *running, momentum or 0.0)


def _instance_statistics(x: Tensor, norm: InstanceNorm) -> tuple[Tensor, Tensor]:
    n, c = x.shape[:2]
    _check_count(x.shape[2:].numel(), x)
    mean, var = _moments(rows(x), norm.weight, None, None, 0.0)
    if norm.training and norm.running_mean is not None and norm.running_var is not None:
        count = x.shape[2:].numel()
        unbiased = var * (count / (count - 1))
        for running, values in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            moved = running.to(values.dtype) * (1 - norm.momentum) + values.view(n, c).mean(0) * norm.momentum
            running.copy_(moved)
    return mean, var


def _moments(
    x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel; moves the running ones by `momentum`."""
    if running_mean is None or running_var is None:
        # the operator answers in the dtype of the running statistics: half precision would be too coarse
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        like = x.new_empty(0, dtype=wide if weight is None else weight.dtype)
        running_mean, running_var, momentum = like.new_zeros(x.shape[1]), like.new_zeros(x.shape[1]), 0.0
    if type(x) is Tensor:
        return torch.batch_norm_update_stats(x, running_mean, running_var, momentum)
    # a fake tensor: the operator has no rule for shapes alone
    axes = [axis for axis in range(x.dim()) if axis != 1]
    var, mean = torch.var_mean(x.to(running_mean.dtype), axes, correction=0)
    return mean, var


def _check_count(count: int, x: Tensor) -> None:
    if count <= 1:
        raise ArgumentError(
            describe(
                expected="more than 1 value per channel when training",
                got=f"input size {tuple(x.shape)}",
                where="norm",
                fix="use a larger batch or larger images",
            )
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        dtype: torch.dtype,
        found: list[FixedNorm],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.uses_input = not isinstance(norm, BatchNorm) or norm.uses_batch
        ctx.dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            fixed, z = _statistics(x.to(dtype), norm, dtype)
        Made(base_of(x), fixed).save(ctx)
        found.append(fixed)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a norm")
        (dz,) = grads
        if dz is None:
            return (None,) * 6
        made, _ = Made.saved(ctx)
        fixed = made.norm
        assert fixed is not None
        needs = list(ctx.needs_input_grad[:3])
        with torch.autocast(dz.device.type, enabled=False):
            x, dz = made.start().to(fixed.dtype), dz.to(fixed.dtype)
            if isinstance(fixed.norm, GroupNorm):
                dx, dgamma, dbeta = _group_backward(dz, x, fixed, fixed.norm, needs)
            else:
                dx, dgamma, dbeta = _batch_backward(dz, x, fixed, fixed.norm, ctx.uses_input, needs)
        return None if dx is None else dx.to(ctx.dtype), dgamma, dbeta, None, None, None


def _group_backward(
    dz: Tensor, x: Tensor, fixed: FixedNorm, norm: GroupNorm, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    n, c, *spatial = x.shape
    positions = torch.Size(spatial).numel()
    x = as_group_norm_reads(x)
    order = torch.contiguous_format
    if not x.is_contiguous():
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return torch.ops.aten.native_group_norm_backward(
        dz.contiguous(memory_format=order),
        x,
        fixed.mean,
        fixed.spread,
        norm.weight,
        n,
        c,
        positions,
        norm.groups,
        needs,
    )


def _batch_backward(
    dz: Tensor, x: Tensor, fixed: FixedNorm, norm: BatchNorm | InstanceNorm, uses_input: bool, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    mean, var, weight, shape = fixed.mean, fixed.spread, norm.weight, x.shape
    if isinstance(norm, InstanceNorm):
        x, dz = rows(x), rows(dz)
        weight = None if weight is None else weight.repeat(shape[0])
    rstd = (var + norm.eps).rsqrt()
    dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
        dz, x, weight, mean, var, mean, rstd, uses_input, norm.eps, needs
    )
    if isinstance(norm, InstanceNorm):
        dx = dx.view(shape) if needs[0] else None
        dgamma, dbeta = (
            v.view(shape[:2]).sum(0) if need else None for v, need in ((dgamma, needs[1]), (dbeta, needs[2]))
        )
    return dx, dgamma, dbeta
