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
from lowtide.lean.remade import (
    FixedNorm,
    Made,
    as_group_norm_reads,
    base_of,
    frozen_copy,
    group_norm,
    mark,
    mark_kept,
    rows,
)
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
        made = Made(base_of(x), found[0])
        mark(z, made)
        if isinstance(made.base, Tensor):
            mark_kept(x)
    return z


def _run(x: Tensor, norm: Norm, dtype: torch.dtype) -> tuple[FixedNorm, Tensor]:
    """The norm with the statistics that it used, and z. Moves the running ones."""
    kept = frozen_copy(norm)
    if isinstance(norm, GroupNorm):
        z, mean, rstd = group_norm(x, norm)
        return FixedNorm(kept, mean, rstd, dtype), z
    if isinstance(norm, InstanceNorm):
        return _run_instance(x, norm, kept, dtype)
    if norm.reduce is not None:
        raise UnsupportedError(
            describe(expected="statistics of one process", got="a process group", where="norm_act_conv")
        )
    if not norm.uses_batch:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        fixed = FixedNorm(kept, norm.running_mean, norm.running_var, dtype, frozen=True)
        return fixed, fixed(x)
    _check_count(x.shape[0] * x.shape[2:].numel(), x)
    momentum = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    running = (norm.running_mean, norm.running_var) if norm.training else (None, None)
    z, mean, rstd = torch.native_batch_norm(x, norm.weight, norm.bias, *running, True, momentum or 0.0, norm.eps)
    return FixedNorm(kept, mean, rstd, dtype), z


def _run_instance(x: Tensor, norm: InstanceNorm, kept: Norm, dtype: torch.dtype) -> tuple[FixedNorm, Tensor]:
    """Batch norm of one image with N * c channels; the running statistics are means over the images."""
    n, c = x.shape[:2]
    _check_count(x.shape[2:].numel(), x)
    weight, bias = (None if v is None else v.repeat(n) for v in (norm.weight, norm.bias))
    moving = (norm.running_mean, norm.running_var) if norm.training else (None, None)
    running_mean, running_var = (None if v is None else v.repeat(n) for v in moving)
    z, mean, rstd = torch.native_batch_norm(
        rows(x), weight, bias, running_mean, running_var, True, norm.momentum, norm.eps
    )
    for old, new in zip(moving, (running_mean, running_var), strict=True):
        if old is not None and new is not None:
            old.copy_(new.view(n, c).mean(0))
    # no view: a view made by a custom function may not be changed in place later
    return FixedNorm(kept, mean, rstd, dtype), torch.ops.aten._unsafe_view(z, x.shape)


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
        ctx.dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            fixed, z = _run(x.to(dtype), norm, dtype)
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
                dx, dgamma, dbeta = _batch_backward(dz, x, fixed, fixed.norm, needs)
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
    dz: Tensor, x: Tensor, fixed: FixedNorm, norm: BatchNorm | InstanceNorm, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight, shape = norm.weight, x.shape
    if isinstance(norm, InstanceNorm):
        x, dz = rows(x), rows(dz)
        weight = None if weight is None else weight.repeat(shape[0])
    running, of_input = ((fixed.mean, fixed.spread), (None, None))[:: 1 if fixed.frozen else -1]
    dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
        dz, x, weight, *running, *of_input, not fixed.frozen, norm.eps, needs
    )
    if isinstance(norm, InstanceNorm):
        dx = dx.view(shape) if needs[0] else None
        dgamma = dgamma.view(shape[:2]).sum(0) if needs[1] else None
        dbeta = dbeta.view(shape[:2]).sum(0) if needs[2] else None
    return dx, dgamma, dbeta
