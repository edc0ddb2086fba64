"""Maps that are made again in backward instead of being kept: the norm's output and the activation's output.

    z = norm(x) with the statistics of the forward,  y = act(z)

A forward step attaches to its output, as a mark on the Python object, how it was made: `Made`. The next step then
keeps what `Made` names (x and small vectors) instead of its own input. A mark is worth nothing once the map was
changed in place, and every operation that knows no marks makes a new tensor without one, so that a mark is never wrong,
only absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import BatchNorm, fill, take_tensors
from lowtide.steps import Activation, GroupNorm, InstanceNorm, Norm

_MARK = "_lowtide_made"
_KEPT = "_lowtide_kept"


@dataclass(frozen=True)
class FixedNorm:
    """A norm and the statistics that its forward used.

    `mean` and `spread` of the input: rstd, (c,) for batch norm, (N * c,) for instance norm, (N, groups) for group norm.
    With `frozen` (batch norm alone) they are the running mean and variance. `dtype` is that of the result.
    """

    norm: Norm
    mean: Tensor
    spread: Tensor
    dtype: torch.dtype
    frozen: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """z, bit for bit the forward's."""
        norm, x = self.norm, x.to(self.dtype)
        if isinstance(norm, GroupNorm):
            return group_norm(x, norm)[0]
        if self.frozen:
            return F.batch_norm(x, self.mean, self.spread, norm.weight, norm.bias, False, 0.0, norm.eps)
        if isinstance(norm, BatchNorm):
            return self._scaled(x, norm.weight, norm.bias)
        weight, bias = (None if v is None else v.repeat(len(x)) for v in (norm.weight, norm.bias))
        return self._scaled(rows(x), weight, bias).view(x.shape)

    def _scaled(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """As the operator does it in training: by weight * rstd. With variance 1 and eps 0 it takes that from us."""
        scale = self.spread if weight is None else self.spread * weight
        return F.batch_norm(x, self.mean, torch.ones_like(self.mean), scale, bias, False, 0.0, 0.0)


def rows(x: Tensor) -> Tensor:
    """(N, c, *S) as (1, N * c, *S): instance norm is batch norm of one image. A copy unless x is contiguous."""
    return x.contiguous().view(1, -1, *x.shape[2:])


def group_norm(x: Tensor, norm: GroupNorm) -> tuple[Tensor, Tensor, Tensor]:
    """z, mean and rstd."""
    n, c, *spatial = x.shape
    positions = torch.Size(spatial).numel()
    return torch.native_group_norm(
        as_group_norm_reads(x), norm.weight, norm.bias, n, c, positions, norm.groups, norm.eps
    )


def as_group_norm_reads(x: Tensor) -> Tensor:
    """In one of the memory orders that the operator takes: on the CPU channels_last is one of them."""
    if x.device.type != "cpu" or x.dim() not in (4, 5) or x.is_contiguous():
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def activation(z: Tensor, act: Activation, *, inplace: bool = False) -> Tensor:
    """act(z), without gradient."""
    match act.function:
        case "relu":
            return F.relu(z, inplace)
        case "relu6":
            return F.hardtanh(z, 0.0, 6.0, inplace)
        case "leaky_relu":
            return F.leaky_relu(z, act.slope, inplace)
        case "prelu":
            assert act.weight is not None
            return torch.prelu(z, act.weight)
        case "elu":
            return F.elu(z, act.slope, inplace)
        case "silu":
            return F.silu(z, inplace)
        case "gelu":
            return F.gelu(z, approximate="tanh" if act.tanh else "none")
        case "hardswish":
            return F.hardswish(z, inplace)
        case "mish":
            return F.mish(z, inplace)


def activation_backward(grad: Tensor, z: Tensor, act: Activation) -> tuple[Tensor, Tensor | None]:
    """grad * act'(z), and the gradient of prelu's weight."""
    aten = torch.ops.aten
    match act.function:
        case "relu":
            return aten.threshold_backward(grad, z, 0), None
        case "relu6":
            return aten.hardtanh_backward(grad, z, 0.0, 6.0), None
        case "leaky_relu":
            return aten.leaky_relu_backward(grad, z, act.slope, False), None
        case "prelu":
            assert act.weight is not None
            return _prelu_backward(grad, z, act.weight)
        case "elu":
            return aten.elu_backward(grad, act.slope, 1.0, 1.0, False, z), None
        case "silu":
            return aten.silu_backward(grad, z), None
        case "gelu":
            return aten.gelu_backward(grad, z, approximate="tanh" if act.tanh else "none"), None
        case "hardswish":
            return aten.hardswish_backward(grad, z), None
        case "mish":
            return aten.mish_backward(grad, z), None


def _prelu_backward(grad: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    slopes = weight.view(-1, *[1] * (z.dim() - 2)) if z.dim() > 1 else weight
    dz, per_number = torch.ops.aten._prelu_kernel_backward(grad, z, slopes)
    other_axes = [axis for axis in range(z.dim()) if axis != 1 or weight.numel() == 1]
    return dz, per_number.sum(other_axes).view(weight.shape)


@dataclass(frozen=True)
class Made:
    """How a map was made: base -> norm -> act, where base is a kept map or the concatenation of such maps.

    `dtype` is the map's where an activation changes it.
    """

    base: Tensor | tuple[Made, ...]
    norm: FixedNorm | None = None
    act: Activation | None = None
    dtype: torch.dtype | None = None

    def start(self) -> Tensor:
        """The base."""
        return self.base if isinstance(self.base, Tensor) else torch.cat([part.again() for part in self.base], 1)

    def before_activation(self) -> Tensor:
        """z again, in the dtype in which the activation reads it."""
        z = self.start() if self.norm is None else self.norm(self.start())
        return z if self.dtype is None else z.to(self.dtype)

    def again(self) -> Tensor:
        """The map again."""
        z = self.before_activation()
        if self.act is None:
            return z
        # in place where z is ours
        return activation(z, self.act, inplace=z is not self.base)

    def save(self, ctx: Any, *others: Tensor | None) -> None:
        """Keep what makes the map, and `others`, on a node."""
        template, tensors = take_tensors(self)
        ctx.save_for_backward(*tensors, *others)
        ctx.made = template

    @staticmethod
    def saved(ctx: Any) -> tuple[Made, list[Tensor]]:
        """Undo `save`."""
        template: Made = ctx.made
        count = len(take_slots(template))
        tensors = list(ctx.saved_tensors)
        return fill(template, tensors[:count]), tensors[count:]


def take_slots(template: Made) -> list[Any]:
    """The slots of a template, in order."""
    return take_tensors(template)[1]


def mark(tensor: Tensor, made: Made) -> None:
    """Attach to `tensor` how it was made."""
    setattr(tensor, _MARK, (made, tensor._version))


def made_of(tensor: Tensor) -> Made | None:
    """How `tensor` was made, if it is known and the tensor was not changed since."""
    made, version = getattr(tensor, _MARK, (None, -1))
    return made if version == tensor._version else None


def base_of(tensor: Tensor) -> Tensor | tuple[Made, ...]:
    """What to keep in place of `tensor`: its parts if it is a concatenation, else itself."""
    made = made_of(tensor)
    return made.base if made is not None and made.norm is None and made.act is None else tensor.detach()


def mark_kept(tensor: Tensor) -> None:
    """Note that a node keeps `tensor` for its own backward: to keep it once more costs nothing, and a change in place
    would be refused anyway. Inputs of the network are left alone: they outlive the step."""
    if tensor.grad_fn is not None:
        setattr(tensor, _KEPT, tensor._version)


def is_kept(tensor: Tensor) -> bool:
    """Whether a node keeps `tensor` as it is now."""
    return getattr(tensor, _KEPT, -1) == tensor._version


def frozen_copy(norm: Norm) -> Norm:
    """`norm` without graph, and without the running statistics that the next forward will move."""
    weight, bias = (None if v is None else v.detach() for v in (norm.weight, norm.bias))
    if isinstance(norm, GroupNorm):
        return GroupNorm(norm.groups, weight, bias, norm.eps)
    kind = BatchNorm if isinstance(norm, BatchNorm) else InstanceNorm
    return kind(weight, bias, None, None, eps=norm.eps)
