"""Arguments of the dense functions: plain tensors and numbers, no modules, so that any model's layers can be described.

`reference` and `lean` take the same values; there is no arithmetic here. Every class is frozen; `None` stands for an
absent tensor (no affine weight, no bias, untracked statistics).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

# Sums a float64 vector over the ranks of a process group, in place.
Reduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class BatchNorm:
    """One batch norm over c channels; tensors (c,), `num_batches_tracked` a scalar.

    Batch statistics are used if `training` or if there are no running ones; running ones are updated if `training`.
    With `reduce`, sums and counts go through it, so that the statistics are those of all ranks (SyncBatchNorm).
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None = None
    eps: float = 1e-5
    momentum: float | None = 0.1
    training: bool = True
    reduce: Reduce | None = None

    @property
    def uses_batch(self) -> bool:
        return self.training or self.running_mean is None


@dataclass(frozen=True)
class Convolution:
    """weight (out, in, *kernel), bias (out,) or None; stride and dilation 1 unless the owner says otherwise."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class DenseLayer:
    """norm1 - relu - conv1 (1x1) - norm2 - relu - conv2 (3x3) - dropout.

    Without bottleneck norm2 and conv2 are None and conv1 is the 3x3 one. `drop_rate` is 0 outside training;
    `drop_channels`: whole channels are dropped (dropout1d, 2d, 3d) instead of single numbers.
    """

    norm1: BatchNorm
    conv1: Convolution
    norm2: BatchNorm | None
    conv2: Convolution | None
    drop_rate: float = 0.0
    drop_channels: bool = False

    @property
    def growth(self) -> int:
        """k, the channels that the layer adds."""
        return (self.conv2 or self.conv1).weight.shape[0]


@dataclass(frozen=True)
class Transition:
    """norm - relu - conv (1x1) - average pool of 2 with stride 2."""

    norm: BatchNorm
    conv: Convolution


@dataclass(frozen=True)
class Head:
    """norm - relu - mean over all positions."""

    norm: BatchNorm


@dataclass(frozen=True)
class Stem:
    """conv (`stride`, `padding`) - norm - relu - max pool of 3 with stride 2 and padding 1."""

    conv: Convolution
    norm: BatchNorm
    stride: tuple[int, ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """Place of a tensor that was taken out of a description: `tensors[index]`."""

    index: int


Parts = TypeVar("Parts")


def _walk(node: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(node, Tensor | Slot):
        return leaf(node)
    if isinstance(node, tuple):
        return tuple(_walk(item, leaf) for item in node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: _walk(getattr(node, f.name), leaf) for f in fields(node)})
    return node


def take_tensors(parts: Parts) -> tuple[Parts, list[Tensor]]:
    """`parts` with a `Slot` in place of each tensor, and the tensors; `fill` undoes it."""
    tensors: list[Tensor] = []

    def leaf(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return _walk(parts, leaf), tensors


def fill(template: Parts, tensors: Sequence[Tensor]) -> Parts:
    """Put the tensors back where their slots are."""
    return _walk(template, lambda slot: tensors[slot.index])


def norms_of(parts: Any) -> Iterable[BatchNorm]:
    """Every batch norm inside `parts`, in order."""
    if isinstance(parts, BatchNorm):
        yield parts
    elif isinstance(parts, tuple):
        for item in parts:
            yield from norms_of(item)
    elif is_dataclass(parts) and not isinstance(parts, type):
        for f in fields(parts):
            yield from norms_of(getattr(parts, f.name))
