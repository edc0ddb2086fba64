"""The functions of DenseNet: plain (`lowtide.reference`) or lean (`lowtide.lean`), chosen by `recompute`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.lean import segment as lean
from lowtide.lean import stem as lean_stem
from lowtide.levels import Level, check_level
from lowtide.parts import DenseLayer, Head, Stem, Transition
from lowtide.reference import dense_block as plain
from lowtide.reference import transition as plain_parts
from lowtide.reference.layers import batch_norm as batch_norm


def dense_block(
    x: Tensor,
    layers: Sequence[DenseLayer],
    tail: Transition | Head | None = None,
    *,
    recompute: Level = "pointwise",
    channels_last: bool | None = None,
) -> Tensor:
    """x (N, c0, *S) -> (N, c0 + L*k, *S): every layer reads all earlier channels and adds k; then the tail, if any.

    Args:
        x: floating-point map with one, two or three spatial axes.
        layers: descriptions of the layers (`lowtide.parts.DenseLayer`), in order.
        tail: a transition or the head, to run in the same autograd node at a lean level.
        recompute: memory level, see `lowtide.levels`.
        channels_last: memory order of a lean level's output; None: as ordinary autograd would answer.

    Saved and recomputed by level: `lowtide.lean.segment`. Running statistics move once per call in training.

    Raises:
        ArgumentError: unknown level; shapes or dtypes that do not fit; fewer than two values per channel in training.
        UnsupportedError: double backward at a lean level; several process groups in one block.
    """
    if check_level(recompute, "dense_block") == "none":
        return plain.dense_block(x, layers, tail)
    return lean.dense_block(x, layers, tail, recompute=recompute, channels_last=channels_last)


def transition(x: Tensor, parts: Transition, *, recompute: Level = "pointwise") -> Tensor:
    """(N, c, *S) -> (N, c_out, *(S // 2)): norm, relu, 1x1 convolution, average pool. Lean: keeps x alone."""
    if check_level(recompute, "transition") == "none":
        return plain_parts.transition(x, parts)
    return lean.transition(x, parts, recompute=recompute)


def stem(x: Tensor, parts: Stem, *, recompute: Level = "pointwise", channels_last: bool | None = None) -> Tensor:
    """(N, c_in, *S) -> (N, c0, *S'): convolution, norm, relu, max pool of 3 with stride 2. See `lowtide.lean.stem`."""
    if check_level(recompute, "stem") == "none":
        return plain_parts.stem(x, parts)
    return lean_stem.stem(x, parts, recompute=recompute, channels_last=channels_last)
