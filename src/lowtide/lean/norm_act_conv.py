"""Norm, activation, and the convolution or max pool that reads it: one map is kept instead of two or three.

    z = norm(x),  y = act(z),  out = conv(y)            each step is one autograd node
    dy = conv'(dout),  dW = <dout, y made again>,  dz = dy * act'(z made again),  dx = norm'(dz, x)

Saved (bytes; "map" = N * c * S * itemsize of x, c channels):
    one map, x, for all three steps, whoever else reads z and y in between;
    batch norm 2c, instance norm 2 N c, group norm 2 N * groups vector elements; a max pool its indices (8 bytes each).
    The parameters are saved too, as by any operation. Without norm the base is the activation's input.
    Plain autograd keeps x and y, and z as well for every activation but relu.
Recomputed: y once for a convolution whose weight trains, z once for an activation. The statistics are taken once, and
    running statistics move once, in the forward.
Exactness: z and y made again are the forward's bit for bit; gradients come from the operators that plain autograd uses.
Raises: ArgumentError for fewer than two values per channel in training; UnsupportedError for double backward.

Every step returns an ordinary tensor with ordinary history: it may be read by anything else, hooked, or modified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.lean.autocast import autocast_dtype
from lowtide.lean.normalise import normalise
from lowtide.lean.remade import Made, activation, activation_backward, is_kept, made_of, mark, mark_kept
from lowtide.lean.segment import refuse_double_backward
from lowtide.steps import Activation, Conv, MaxPool, Norm


def norm_act_conv(x: Tensor, norm: Norm | None, act: Activation | None, conv: Conv | MaxPool | None) -> Tensor:
    """x (N, c, *S) -> conv(act(norm(x))); None leaves a step out. See the module's text for what is saved."""
    if norm is not None:
        x = normalise(x, norm)
    if act is not None:
        x = activate(x, act)
    if isinstance(conv, Conv):
        return convolve(x, conv)
    return x if conv is None else max_pool(x, conv)


def activate(x: Tensor, act: Activation) -> Tensor:
    """The pointwise function `act` of x (N, c, *S)."""
    made = made_of(x)
    if made is None or made.act is not None:
        made = Made(x.detach())  # a second activation in a row: the first one's output is the base
    dtype = autocast_dtype(act, x, None if act.weight is None else act.weight.dtype)
    if dtype == x.dtype:
        dtype = None
    weight = act.weight if dtype is None or act.weight is None else act.weight.to(dtype)
    act = replace(act, weight=None if weight is None else weight.detach())
    made = replace(made, act=act, dtype=dtype)
    # what is kept must not be overwritten: without a norm the input is the base
    inplace = act.inplace and dtype is None and made.norm is not None and x.requires_grad
    y = (_ActInPlace if inplace else _Act).apply(x, weight, made)
    if made.norm is None and isinstance(made.base, Tensor):
        mark_kept(x)
    if y.requires_grad:
        mark(y, made)
    return y


class _Act(torch.autograd.Function):
    inplace = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, made: Made) -> Tensor:
        ctx.set_materialize_grads(False)
        assert made.act is not None
        made.save(ctx)
        ctx.dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return activation(x if made.dtype is None else x.to(made.dtype), made.act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("an activation")
        (dy,) = grads
        if dy is None:
            return None, None, None
        made, _ = Made.saved(ctx)
        assert made.act is not None
        with torch.autocast(dy.device.type, enabled=False):
            z = made.before_activation()
            dz, dweight = activation_backward(dy.to(z.dtype), z, made.act)
        return dz.to(ctx.dtype), dweight, None


class _ActInPlace(_Act):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, made: Made) -> Tensor:
        ctx.set_materialize_grads(False)
        assert made.act is not None
        made.save(ctx)
        ctx.dtype = x.dtype
        ctx.mark_dirty(x)
        return activation(x, made.act, inplace=True)


def convolve(x: Tensor, conv: Conv) -> Tensor:
    """Convolution of x (N, c, *S), or a transposed one; keeps what makes x where that is known, x elsewhere."""
    dtype = autocast_dtype(conv, x, conv.weight.dtype)
    weight, bias = conv.weight, conv.bias
    if dtype is not None:
        # outside the node, where autograd sees it
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _Conv.apply(
        x, weight, bias, replace(conv, weight=weight.detach(), bias=None), made_of(x) or Made(x.detach())
    )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv, made: Made) -> Tensor:
        made.save(ctx, weight)
        ctx.dtype, ctx.has_bias, ctx.numbers = x.dtype, bias is not None, _numbers(conv)
        ctx.like = (x.shape, x.stride())
        with torch.autocast(x.device.type, enabled=False):
            return torch.convolution(x.to(weight.dtype), weight, bias, *ctx.numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a convolution")
        (dout,) = grads
        made, (weight,) = Made.saved(ctx)
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        channels = [dout.shape[1]] if ctx.has_bias else None
        backward = torch.ops.aten.convolution_backward
        dx = dw = db = None
        with torch.autocast(dout.device.type, enabled=False):
            if needs[1] or needs[2]:
                y = made.again().to(weight.dtype)
                _, dw, db = backward(dout, y, weight, channels, *ctx.numbers, [False, *needs[1:]])
                del y
            if needs[0]:
                # in place of y, which is not needed any more: its shape and memory order alone are read
                like = _placeholder(made, ctx.like, weight.dtype)
                dx, _, _ = backward(dout, like, weight, channels, *ctx.numbers, [True, False, False])
                dx = dx.to(ctx.dtype)
        return dx, dw, db, None, None


def _numbers(conv: Conv) -> tuple[Any, ...]:
    zeros = [0] * len(conv.stride)
    return (
        list(conv.stride),
        list(conv.padding),
        list(conv.dilation),
        conv.transposed,
        list(conv.output_padding) or zeros,
        conv.groups,
    )


def _placeholder(made: Made, like: tuple[torch.Size, tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    """A tensor of the given shape and strides whose values do not matter; the base itself where it serves."""
    base = made.base
    if isinstance(base, Tensor):
        return base if base.dtype == dtype else torch.empty_strided(*like, dtype=dtype, device=base.device)
    first = base[0].base
    while not isinstance(first, Tensor):
        first = first[0].base
    return torch.empty_strided(*like, dtype=dtype, device=first.device)


def concatenate(maps: Sequence[Tensor]) -> Tensor:
    """cat(maps, 1), which the next step does not keep where that spares bytes: it keeps what makes the maps.

    A map that can be made again or that a node keeps already costs nothing; of every other one a copy is kept, so that
    the map itself may still be changed in place.
    """
    joined = torch.cat(list(maps), 1)
    if joined.requires_grad and any(map(can_be_spared, maps)) and len({part.dtype for part in maps}) == 1:
        mark(joined, Made(tuple(_part(part) for part in maps)))
    return joined


def can_be_spared(x: Tensor) -> bool:
    """Whether x can be made again, or is kept as it is by a node."""
    return made_of(x) is not None or is_kept(x)


def _part(x: Tensor) -> Made:
    return made_of(x) or Made(x.detach() if is_kept(x) else x.detach().clone())


def max_pool(x: Tensor, pool: MaxPool) -> Tensor:
    """Largest value of each window of x (N, c, *S). Keeps the indices, and not x."""
    made = made_of(x)
    if made is None:
        return _plain_pool(x, pool)[0]
    return _MaxPool.apply(x, pool)


def _plain_pool(x: Tensor, pool: MaxPool) -> tuple[Tensor, Tensor]:
    dims = len(pool.kernel)
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[dims]
    return function(x, pool.kernel, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, return_indices=True)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: MaxPool) -> Tensor:
        out, indices = _plain_pool(x, pool)
        ctx.save_for_backward(indices)
        ctx.pool, ctx.like = pool, (x.shape, x.stride())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a max pool")
        (dout,) = grads
        (indices,) = ctx.saved_tensors
        pool: MaxPool = ctx.pool
        # the operator reads the shape of its input, and no value
        like = torch.empty_strided(*ctx.like, dtype=dout.dtype, device=dout.device)
        numbers = [list(v) for v in (pool.kernel, pool.stride, pool.padding, pool.dilation)]
        aten = torch.ops.aten
        if len(pool.kernel) == 1:
            numbers = [[neutral, *v] for neutral, v in zip((1, 1, 0, 1), numbers, strict=True)]
            like, dout, indices = like.unsqueeze(2), dout.unsqueeze(2), indices.unsqueeze(2)
        backward = (
            aten.max_pool3d_with_indices_backward
            if like.dim() == 5 and len(pool.kernel) == 3
            else (aten.max_pool2d_with_indices_backward)
        )
        dx = backward(dout, like, *numbers, pool.ceil_mode, indices)
        return dx.squeeze(2) if len(pool.kernel) == 1 else dx, None
