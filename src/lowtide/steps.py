"""Arguments of the norm - activation - convolution functions: plain tensors and numbers, no modules.

`reference` and `lean` take the same values; there is no arithmetic here. Every class is frozen; `None` stands for an
absent tensor. A batch norm is described by `lowtide.parts.BatchNorm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lowtide.parts import BatchNorm

Function = Literal["relu", "relu6", "leaky_relu", "prelu", "elu", "silu", "gelu", "hardswish", "mish"]


@dataclass(frozen=True)
class InstanceNorm:
    """Statistics per image and channel. Tensors (c,).

    Running ones are updated if `training`, and used instead of the image's if there are any and not `training`.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    eps: float = 1e-5
    momentum: float = 0.1
    training: bool = True

    @property
    def uses_images(self) -> bool:
        return self.training or self.running_mean is None


@dataclass(frozen=True)
class GroupNorm:
    """Statistics per image and group of c / groups channels. Tensors (c,)."""

    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float = 1e-5


Norm = BatchNorm | InstanceNorm | GroupNorm


@dataclass(frozen=True)
class Activation:
    """One pointwise function.

    `slope`: of the negative part of leaky_relu (also the alpha of elu). `weight` (1,) or (c,): prelu's slopes. `tanh`:
    gelu's tanh approximation. `inplace`: the input's memory takes the result.
    """

    function: Function
    slope: float = 0.01
    weight: Tensor | None = None
    tanh: bool = False
    inplace: bool = False


@dataclass(frozen=True)
class Conv:
    """weight (out, in / groups, *kernel), or (in, out / groups, *kernel) if `transposed`; bias (out,) or None.

    The tuples have one number per spatial axis. Padding is with zeros.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1


@dataclass(frozen=True)
class MaxPool:
    """The tuples have one number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
