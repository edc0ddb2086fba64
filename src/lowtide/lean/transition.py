"""What follows a dense block, straight from its feature buffer: transition and head, a few images at a time.

    transition   z = relu(scale * F + shift);  y = W pool(z)      average pooling commutes with the 1x1 convolution,
                                                                  so pool first: a quarter of the work and of the map
                 dz = pool^T(W^T dy), and W's gradient is sum dy * pool(z)
    head         y = mean over positions of z;  dz = dy / S

Neither keeps anything: the backward makes z again from F and adds scale * dz * relu'(z) to dF; the rest of batch norm's
backward is affine in F and joins the block's deferred correction.

Source: Huang et al. 2017, arXiv 1608.06993, section 3 ("pooling layers").
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.kernels import accumulation_dtype, alike
from lowtide.kernels.pools import average_pooled
from lowtide.lean.batch_norm import Affine, correction
from lowtide.lean.dense_block import Corrections, Put, Tools, Want
from lowtide.lean.maps import add_outer_, image_tiles, in_form_of, is_rows, mix, mixed, new_images
from lowtide.parts import BatchNorm, Head, Transition


def transition_forward(tools: Tools, features: Tensor, at: Affine, parts: Transition) -> Tensor:
    """y (N, c_out, *(S // 2)) from F (N, C, S)."""
    weight = parts.conv.weight.detach().to(tools.dtype).flatten(1)
    size = average_pooled(tools.spatial)
    y = new_images(features, (len(features), len(weight), *size), channels_last=tools.plain_rows, dtype=tools.dtype)
    out = y.view(*y.shape[:2], -1) if y.numel() else y.flatten(2)
    for images in alike(_pool_tiles(tools, features)):
        _mix(tools, weight, _pooled(tools, features[images], at), out[images])
    if parts.conv.bias is not None:
        out += parts.conv.bias.detach().to(out.dtype)[:, None]
    return y


def transition_backward(
    tools: Tools,
    features: Tensor,
    grad: Tensor | None,
    grad_out: Tensor,
    at: Affine,
    parts: Transition,
    slot: Transition,
    count: float,
    corrections: Corrections,
    want: Want,
    put: Put,
) -> None:
    """Adds to `grad` (dF, None if nobody asks for it) and to the corrections; grad_out (N, c_out, *(S // 2))."""
    weight = parts.conv.weight.detach().to(tools.dtype).flatten(1)
    acc = at.scale.dtype
    dweight = torch.zeros_like(weight, dtype=acc) if want(slot.conv.weight) else None
    needs_dz = grad is not None or want(slot.norm.weight) or want(slot.norm.bias)
    sums, sums_x = torch.zeros_like(at.scale), torch.zeros_like(at.scale)
    weight_t = weight.t().contiguous()
    dy = grad_out.flatten(2)
    for images in alike(_pool_tiles(tools, features)):
        x = features[images]
        dy_part = in_form_of(x, dy[images].to(tools.dtype))
        if dweight is not None:
            add_outer_(dweight, dy_part, _pooled(tools, x, at))
        if needs_dz:
            dpooled = in_form_of(x, mixed(weight_t, dy_part, tools.scratch, "dpooled", rows=is_rows(x)))
            total = None if grad is None else grad[images]
            tools.kernels.norm_act_average_pool_backward(
                dpooled, x, at.scale, at.shift, at.mean, tools.spatial, total, sums, sums_x
            )
    if dweight is not None:
        put(slot.conv.weight, dweight.view(parts.conv.weight.shape))
    if want(slot.conv.bias):
        put(slot.conv.bias, dy.sum((0, 2), dtype=acc))
    if needs_dz:
        _finish(parts.norm, slot.norm, at, sums, sums_x, count, grad is not None, corrections, want, put)


def head_forward(tools: Tools, features: Tensor, at: Affine) -> Tensor:
    """Mean over positions of relu(batch norm of F): (N, C)."""
    y = features.new_empty(features.shape[:2])
    for images in alike(_tiles(tools, features)):
        z = _activated(tools, features[images], at, dtype=features.dtype)
        torch.mean(z, 2, out=y[images])
    return y


def head_backward(
    tools: Tools,
    features: Tensor,
    grad: Tensor | None,
    grad_out: Tensor,
    at: Affine,
    parts: Head,
    slot: Head,
    count: float,
    corrections: Corrections,
    want: Want,
    put: Put,
) -> None:
    """As `transition_backward`, for the head; grad_out (N, C)."""
    if grad is None and not want(slot.norm.weight) and not want(slot.norm.bias):
        return
    sums, sums_x = torch.zeros_like(at.scale), torch.zeros_like(at.scale)
    for images in alike(_tiles(tools, features)):
        x = features[images]
        dz = torch.empty_like(x)
        dz.copy_((grad_out[images] / x.shape[2])[:, :, None])
        _add_to_features(tools, dz, x, at, None if grad is None else grad[images], sums, sums_x)
    _finish(parts.norm, slot.norm, at, sums, sums_x, count, grad is not None, corrections, want, put)


def _tiles(tools: Tools, features: Tensor) -> Iterator[slice]:
    n, c, s = features.shape
    return image_tiles(n, c * s * tools.dtype.itemsize, tools.budget)


def _activated(tools: Tools, x: Tensor, at: Affine, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None or dtype == tools.dtype:
        z = tools.scratch("z", *x.shape)
    else:
        z = torch.empty_like(x, dtype=dtype)
    tools.kernels.scale_shift_act(x, at.scale, at.shift, "relu", z)
    return z


def _pool_tiles(tools: Tools, features: Tensor) -> Iterator[slice]:
    """Only the pool's output lies in scratch where the pass is fused."""
    n, c, s = features.shape
    if tools.kernels.fuses_pool(features):
        s = torch.Size(average_pooled(tools.spatial)).numel()
    return image_tiles(n, c * s * tools.dtype.itemsize, tools.budget)


def _pooled(tools: Tools, x: Tensor, at: Affine) -> Tensor:
    """pool(relu(scale * x + shift)), (n, c, S2), in scratch."""
    positions = torch.Size(average_pooled(tools.spatial)).numel()
    pooled = tools.scratch("pooled", x.shape[0], x.shape[1], positions, rows=is_rows(x))
    tools.kernels.norm_act_average_pool(x, at.scale, at.shift, tools.spatial, pooled)
    return pooled


def _mix(tools: Tools, weight: Tensor, pooled: Tensor, out: Tensor) -> None:
    if tools.kernels.fuses_mix(pooled, out):
        # relu changes nothing: the pooled numbers are not negative
        one = torch.ones(pooled.shape[1], dtype=accumulation_dtype(pooled), device=pooled.device)
        tools.kernels.norm_act_mix(pooled, one, torch.zeros_like(one), weight, out)
    else:
        mix(weight, pooled, out)


def _add_to_features(
    tools: Tools, dz: Tensor, x: Tensor, at: Affine, total: Tensor | None, sums: Tensor, sums_x: Tensor
) -> None:
    if total is None:
        part, part_x = tools.kernels.act_backward_sums_(dz, x, at.scale, at.shift, "relu", at.mean)
        sums += part
        sums_x += part_x
    else:
        tools.kernels.act_backward_accumulate(dz, x, at.scale, at.shift, "relu", at.mean, total, sums, sums_x)


def _finish(
    norm: BatchNorm,
    slot: BatchNorm,
    at: Affine,
    sums: Tensor,
    sums_x: Tensor,
    count: float,
    needs_input: bool,
    corrections: Corrections,
    want: Want,
    put: Put,
) -> None:
    fix = correction(norm, at, sums, sums_x, count, needs_input)
    corrections.add(fix.slope, fix.offset)
    if want(slot.weight):
        put(slot.weight, fix.dgamma)
    if want(slot.bias):
        put(slot.bias, fix.dbeta)
