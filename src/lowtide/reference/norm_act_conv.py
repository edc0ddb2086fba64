"""Norm, activation, and the convolution or max pool that reads it, in ordinary autograd.

    z = norm(x),  y = act(z),  out = conv(y)

Autograd keeps x and y (z too, where the activation's derivative needs its input): two or three maps for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import BatchNorm
from lowtide.reference.layers import batch_norm
from lowtide.steps import Activation, Conv, GroupNorm, MaxPool, Norm


def norm_act_conv(x: Tensor, norm: Norm | None, act: Activation | None, conv: Conv | MaxPool | None) -> Tensor:
    """x (N, c, *S) -> conv(act(norm(x))); None leaves a step out."""
    if norm is not None:
        x = normalise(x, norm)
    if act is not None:
        x = activate(x, act)
    if isinstance(conv, Conv):
        return convolve(x, conv)
    return x if conv is None else max_pool(x, conv)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """x (N, c, *S) normalised; running statistics move once in training."""
    if isinstance(norm, BatchNorm):
        return batch_norm(x, norm)
    if isinstance(norm, GroupNorm):
        return F.group_norm(x, norm.groups, norm.weight, norm.bias, norm.eps)
    return F.instance_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.uses_images, norm.momentum, norm.eps
    )


def activate(x: Tensor, act: Activation) -> Tensor:
    """The pointwise function `act` of x (N, c, *S)."""
    match act.function:
        case "relu":
            return F.relu(x, act.inplace)
        case "relu6":
            return F.relu6(x, act.inplace)
        case "leaky_relu":
            return F.leaky_relu(x, act.slope, act.inplace)
        case "prelu":
            assert act.weight is not None
            return F.prelu(x, act.weight)
        case "elu":
            return F.elu(x, act.slope, act.inplace)
        case "silu":
            return F.silu(x, act.inplace)
        case "gelu":
            return F.gelu(x, approximate="tanh" if act.tanh else "none")
        case "hardswish":
            return F.hardswish(x, act.inplace)
        case "mish":
            return F.mish(x, act.inplace)


def concatenate(maps: Sequence[Tensor]) -> Tensor:
    """The channels of all maps (N, c_i, *S), one after the other."""
    return torch.cat(list(maps), 1)


def convolve(x: Tensor, conv: Conv) -> Tensor:
    """Convolution of x (N, c, *S), or a transposed one."""
    dims = x.dim() - 2
    if conv.transposed:
        up = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
        return up(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return function(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def max_pool(x: Tensor, pool: MaxPool) -> Tensor:
    """Largest value of each window of x (N, c, *S)."""
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[x.dim() - 2]
    return function(x, pool.kernel, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
