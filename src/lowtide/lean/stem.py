"""The stem of a DenseNet for large images as one autograd node: conv - norm - relu - max pool.

    y = conv(x);  out = maxpool(relu(scale * y + shift))

Saved: at "pointwise" y (N * c0 * S1 * itemsize bytes, S1 the positions after the convolution); at "layer" and "block"
    the image alone, and y is made again. At every level 2 c0 vector elements. Plain autograd keeps y, relu's output and
    the pool's indices (8 bytes each).
Recomputed: the activation and the pool's choice, a few images at a time.
Exactness: as `lowtide.lean.segment`. Raises: ArgumentError, UnsupportedError for double backward.
Source: Huang et al. 2017, arXiv 1608.06993, table 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lowtide.errors import ArgumentError, describe
from lowtide.kernels import select
from lowtide.lean.batch_norm import Affine, Moments, affine, batch_moments, check_count, correction, update_running
from lowtide.lean.maps import image_tiles, is_channels_last, new_images, tile_bytes
from lowtide.lean.segment import convolution_dtype, refuse_double_backward, without_moving_buffers
from lowtide.levels import Level
from lowtide.parts import Slot, Stem, fill, take_tensors


def stem(x: Tensor, parts: Stem, *, recompute: Level = "layer") -> Tensor:
    """x (N, c_in, *S) -> (N, c0, *S'), S' about S / 4; see the module's text for what is saved."""
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
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in tensors)):
        return _Stem.apply(parts, template, recompute == "pointwise", dtype, x, *tensors)
    with torch.no_grad():
        return _forward(parts, dtype, x)[0]


def _lasting(parts: Stem) -> Stem:
    return Stem(parts.conv, without_moving_buffers(parts.norm), parts.stride, parts.padding)


def _convolve(parts: Stem, x: Tensor, dtype: torch.dtype) -> Tensor:
    bias = None if parts.conv.bias is None else parts.conv.bias.detach().to(dtype)
    ones, zeros = [1] * len(parts.stride), [0] * len(parts.stride)
    weight = parts.conv.weight.detach().to(dtype)
    return torch.convolution(
        x.detach().to(dtype), weight, bias, list(parts.stride), list(parts.padding), ones, False, zeros, 1
    )


def _activated(y: Tensor, at: Affine) -> Tensor:
    z = torch.empty_like(y)
    select(y).scale_shift_act(y.flatten(2), at.scale, at.shift, "relu", z.flatten(2))
    return _as_grid(z)


def _as_grid(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x


def _windows(dims: int) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride and padding of the max pool; one spatial axis runs as (1, S)."""
    return ([1, 3], [1, 2], [0, 1]) if dims == 1 else ([3] * dims, [2] * dims, [1] * dims)


def _pool(z: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    kernel, stride, padding = _windows(dims)
    aten = torch.ops.aten
    pool = aten.max_pool3d_with_indices if dims == 3 else aten.max_pool2d_with_indices
    return pool(z, kernel, stride, padding)


def _pool_backward(grad: Tensor, z: Tensor, indices: Tensor, dims: int) -> Tensor:
    kernel, stride, padding = _windows(dims)
    aten = torch.ops.aten
    backward = aten.max_pool3d_with_indices_backward if dims == 3 else aten.max_pool2d_with_indices_backward
    return backward(grad, z, kernel, stride, padding, [1] * len(kernel), False, indices)


def _forward(parts: Stem, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor, Moments]:
    with torch.autocast(x.device.type, enabled=False):
        y = _convolve(parts, x, dtype)
        check_count(parts.norm, y)
        moments = Moments(y.new_empty(0), y.new_empty(0), 0.0)
        if parts.norm.uses_batch:
            moments = batch_moments(select(y), y.flatten(2), parts.norm.reduce)
        at = affine(parts.norm, moments, y)
        update_running(parts.norm, moments)
        dims = y.dim() - 2
        size = [(s - 1) // 2 + 1 for s in y.shape[2:]]
        out = new_images(y, (*y.shape[:2], *size), channels_last=is_channels_last(y), dtype=dtype)
        for images in _tiles(y):
            out[images] = _pool(_activated(y[images], at), dims)[0].view(out[images].shape)
    return out, y, moments


def _tiles(y: Tensor) -> Any:
    return image_tiles(len(y), y[:1].numel() * y.element_size(), tile_bytes(y.device))


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, parts: Stem, template: Stem, keep: bool, dtype: torch.dtype, x: Tensor, *tensors: Tensor
    ) -> Tensor:
        out, y, moments = _forward(parts, dtype, x)
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
        needs = ctx.needs_input_grad[5:]
        grads: list[Tensor | None] = [None] * len(rest)

        def put(slot: object, value: Tensor) -> None:
            if isinstance(slot, Slot) and needs[slot.index]:
                grads[slot.index] = value.to(rest[slot.index].dtype)

        with torch.autocast(x.device.type, enabled=False):
            if y is None:
                y = _convolve(parts, x, ctx.dtype)
            at = affine(parts.norm, Moments(mean, var, ctx.count), y)
            dy = torch.empty_like(y)
            sums, sums_x = torch.zeros_like(at.scale), torch.zeros_like(at.scale)
            dims = y.dim() - 2
            for images in _tiles(y):
                z = _activated(y[images], at)
                _, indices = _pool(z, dims)
                grad = _as_grid(grad_out[images]).to(z.dtype)
                # relu passes no gradient where z = 0, so the mask of z is that of the input
                dz = _pool_backward(grad.contiguous(memory_format=_format(z)), z, indices, dims)
                dy[images] = dz.view(dy[images].shape)
                part, part_x = select(y).act_backward_sums_(
                    dy[images].flatten(2), y[images].flatten(2), at.scale, at.shift, "relu", at.mean
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
            select(y).affine_add_(dy.flatten(2), at.scale, y.flatten(2), slope, offset)
            dx = _convolution_backward(ctx, parts, slot, x, dy, needs, put)
        return None, None, None, None, dx, *grads


def _format(z: Tensor) -> torch.memory_format:
    if not is_channels_last(z):
        return torch.contiguous_format
    return torch.channels_last if z.dim() == 4 else torch.channels_last_3d


def _convolution_backward(
    ctx: Any, parts: Stem, slot: Stem, x: Tensor, dy: Tensor, needs: tuple[bool, ...], put: Any
) -> Tensor | None:
    def wanted(place: object) -> bool:
        return isinstance(place, Slot) and needs[place.index]

    masks = [ctx.needs_input_grad[4], wanted(slot.conv.weight), wanted(slot.conv.bias)]
    ones, zeros = [1] * len(parts.stride), [0] * len(parts.stride)
    out = len(parts.conv.weight)
    dx, dw, db = torch.ops.aten.convolution_backward(
        dy,
        x.to(ctx.dtype),
        parts.conv.weight.to(ctx.dtype),
        [out],
        list(parts.stride),
        list(parts.padding),
        ones,
        False,
        zeros,
        1,
        masks,
    )
    if dw is not None and masks[1]:
        put(slot.conv.weight, dw)
    if db is not None and masks[2]:
        put(slot.conv.bias, db)
    return dx.to(x.dtype) if masks[0] else None
