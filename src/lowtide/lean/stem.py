"""The stem of a DenseNet for large images as one autograd node: conv - norm - relu - max pool.

    y = conv(x);  out = maxpool(relu(scale * y + shift))
    backward, m the pool's gradient where it chose and relu lets it through:
        sums of m and m * (y - mean) over the pool's windows alone;  dy = scale * m + slope * y + offset, in place of y

Saved: at "pointwise" y (N * c0 * S1 * itemsize bytes, S1 the positions after the convolution); at "layer" and "block"
    the image alone, and y is made again. At every level 2 c0 vector elements. Plain autograd keeps y, relu's output and
    the pool's indices (8 bytes each).
Recomputed: the activation and the pool's choice. Beside y there are maps of the pool's size alone.
Exactness: as `lowtide.lean.segment`. Raises: ArgumentError, UnsupportedError for double backward.
Source: Huang et al. 2017, arXiv 1608.06993, table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lowtide.errors import ArgumentError, describe
from lowtide.kernels import alike, select
from lowtide.kernels.pools import max_pooled
from lowtide.lean.batch_norm import Moments, affine, batch_moments, check_count, correction, update_running
from lowtide.lean.maps import (
    as_channels_last,
    image_tiles,
    in_form_of,
    is_channels_last,
    is_rows,
    kernel_grid,
    new_images,
    new_map,
    tile_bytes,
    to_grid,
)
from lowtide.lean.segment import convolution_dtype, refuse_double_backward, without_moving_buffers
from lowtide.levels import Level
from lowtide.parts import Slot, Stem, fill, take_tensors


def stem(x: Tensor, parts: Stem, *, recompute: Level = "layer", channels_last: bool | None = None) -> Tensor:
    """x (N, c_in, *S) -> (N, c0, *S'), S' about S / 4; see the module's text for what is saved.

    channels_last: the output's memory order; None: that of ordinary autograd.
    """
    if x.dim() != parts.conv.weight.dim() or x.shape[1] != parts.conv.weight.shape[1]:
        raise ArgumentError(
            describe(
                expected=f"a map for a convolution {tuple(parts.conv.weight.shape)}",
                got=str(tuple(x.shape)),
                where="stem",
            )
        )
    dtype = convolution_dtype(x, parts.conv.weight, "stem")
    template, tensors = take_tensors(_lasting(parts))
    if channels_last is None:
        channels_last = is_channels_last(x) or is_channels_last(parts.conv.weight)
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in tensors)):
        return _Stem.apply(parts, template, (recompute == "pointwise", channels_last, dtype), x, *tensors)
    with torch.no_grad():
        return _forward(parts, dtype, x, channels_last)[0]


def _lasting(parts: Stem) -> Stem:
    return Stem(parts.conv, without_moving_buffers(parts.norm), parts.stride, parts.padding)


def _convolution(parts: Stem, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Image, weight, stride and padding on two or three axes; on a CPU the weight's memory order makes rows."""
    weight = kernel_grid(parts.conv.weight.detach().to(dtype))
    if x.device.type == "cpu":
        weight = as_channels_last(weight)
    missing = weight.dim() - x.dim()
    image = x.detach().to(dtype)
    return (
        image.unsqueeze(2) if missing else image,
        weight,
        [1] * missing + list(parts.stride),
        [0] * missing + list(parts.padding),
    )


def _convolve(parts: Stem, x: Tensor, dtype: torch.dtype) -> Tensor:
    """conv(x) as a map (N, c0, S1), in rows on a CPU."""
    image, weight, stride, padding = _convolution(parts, x, dtype)
    bias = None if parts.conv.bias is None else parts.conv.bias.detach().to(dtype)
    ones, zeros = [1] * len(stride), [0] * len(stride)
    y = torch.convolution(image, weight, bias, stride, padding, ones, False, zeros, 1).flatten(2)
    if x.device.type == "cpu" and not is_rows(y):  # float64 in three dimensions
        return new_map(y, *y.shape, rows=True, dtype=y.dtype).copy_(y)
    return y


def _sizes(parts: Stem, x: Tensor) -> tuple[int, ...]:
    """The spatial axes after the convolution."""
    kernel = parts.conv.weight.shape[2:]
    return tuple(
        (size + 2 * padding - reach) // stride + 1
        for size, padding, reach, stride in zip(x.shape[2:], parts.padding, kernel, parts.stride, strict=True)
    )


def _forward(parts: Stem, dtype: torch.dtype, x: Tensor, channels_last: bool) -> tuple[Tensor, Tensor, Moments]:
    with torch.autocast(x.device.type, enabled=False):
        y, spatial = _convolve(parts, x, dtype), _sizes(parts, x)
        check_count(parts.norm, y)
        moments = Moments(y.new_empty(0), y.new_empty(0), 0.0)
        kernels = select(y)
        if parts.norm.uses_batch:
            moments = batch_moments(kernels, y, parts.norm.reduce)
        at = affine(parts.norm, moments, y)
        update_running(parts.norm, moments)
        out = new_images(y, (*y.shape[:2], *max_pooled(spatial)), channels_last=channels_last, dtype=dtype)
        pooled = out.flatten(2)
        for images in alike(_tiles(y)):
            part = pooled[images]
            tile = part if is_rows(part) == is_rows(y) else new_map(y, *part.shape, rows=is_rows(y), dtype=dtype)
            kernels.norm_act_max_pool(y[images], at.scale, at.shift, spatial, tile)
            if tile is not part:
                part.copy_(tile)
    return out, y, moments


def _tiles(y: Tensor) -> Iterator[slice]:
    return image_tiles(len(y), y[:1].numel() * y.element_size(), tile_bytes(y.device))


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, parts: Stem, template: Stem, how: tuple[bool, bool, torch.dtype], x: Tensor, *tensors: Tensor
    ) -> Tensor:
        keep, channels_last, dtype = how
        out, y, moments = _forward(parts, dtype, x, channels_last)
        ctx.save_for_backward(x, moments.mean, moments.var, *([y] if keep else []), *tensors)
        ctx.template, ctx.keep, ctx.dtype, ctx.count = template, keep, dtype, moments.size  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a stem")
        (grad_out,) = grad_outputs
        x, mean, var, *rest = ctx.saved_tensors
        y = rest.pop(0) if ctx.keep else None
        parts: Stem = fill(ctx.template, rest)
        needs = ctx.needs_input_grad[4:]
        grads: list[Tensor | None] = [None] * len(rest)

        def put(slot: object, value: Tensor) -> None:
            if isinstance(slot, Slot) and needs[slot.index]:
                grads[slot.index] = value.to(rest[slot.index].dtype)

        with torch.autocast(x.device.type, enabled=False):
            if y is None:
                y = _convolve(parts, x, ctx.dtype)
            kernels, spatial = select(y), _sizes(parts, x)
            at = affine(parts.norm, Moments(mean, var, ctx.count), y)
            grad = in_form_of(y, grad_out.flatten(2).to(ctx.dtype))
            choice = new_map(y, *grad.shape, rows=is_rows(y), dtype=torch.int32)
            sums, sums_x = torch.zeros_like(at.scale), torch.zeros_like(at.scale)
            for images in alike(_tiles(y)):
                part, part_x = kernels.norm_act_max_pool_sums(
                    grad[images], y[images], at.scale, at.shift, at.mean, spatial, choice[images]
                )
                sums += part
                sums_x += part_x
            fix = correction(parts.norm, at, sums, sums_x, ctx.count)
            slot = ctx.template
            put(slot.norm.weight, fix.dgamma)
            put(slot.norm.bias, fix.dbeta)
            zero = torch.zeros_like(sums)
            slope = zero if fix.slope is None else fix.slope
            offset = zero if fix.offset is None else fix.offset
            dy = torch.empty_like(y) if ctx.keep else y  # a kept y may be needed again
            for images in alike(_tiles(y)):
                kernels.norm_act_max_pool_backward(
                    grad[images], y[images], choice[images], at.scale, slope, offset, spatial, dy[images]
                )
            dx = _convolution_backward(ctx, parts, slot, x, dy, needs, put)
        return None, None, None, dx, *grads


def _convolution_backward(
    ctx: Any, parts: Stem, slot: Stem, x: Tensor, dy: Tensor, needs: tuple[bool, ...], put: Any
) -> Tensor | None:
    def wanted(place: object) -> bool:
        return isinstance(place, Slot) and needs[place.index]

    masks = [ctx.needs_input_grad[3], wanted(slot.conv.weight), wanted(slot.conv.bias)]
    if not any(masks):
        return None
    image, weight, stride, padding = _convolution(parts, x, ctx.dtype)
    ones, zeros = [1] * len(stride), [0] * len(stride)
    dx, dw, db = torch.ops.aten.convolution_backward(
        to_grid(dy, _sizes(parts, x)), image, weight, [len(weight)], stride, padding, ones, False, zeros, 1, masks
    )
    if dw is not None and masks[1]:
        put(slot.conv.weight, dw.view_as(parts.conv.weight))
    if db is not None and masks[2]:
        put(slot.conv.bias, db)
    return dx.view_as(x).to(x.dtype) if masks[0] else None
