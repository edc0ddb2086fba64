"""Norm, activation, convolution or max pool: plain (`lowtide.reference`) or lean (`lowtide.lean`), by `recompute`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowtide.lean import norm_act_conv as lean
from lowtide.lean.remade import mark_kept
from lowtide.levels import Level, check_level
from lowtide.reference import norm_act_conv as plain
from lowtide.steps import Activation, Conv, MaxPool, Norm


def norm_act_conv(
    x: Tensor,
    norm: Norm | None,
    act: Activation | None,
    conv: Conv | MaxPool | None,
    *,
    recompute: Level = "pointwise",
) -> Tensor:
    """x (N, c, *S) -> conv(act(norm(x))), keeping x alone at a lean level; None leaves a step out.

    Args:
        x: floating-point map with one, two or three spatial axes.
        norm: `lowtide.parts.BatchNorm`, `lowtide.steps.InstanceNorm` or `GroupNorm`.
        act, conv: see `lowtide.steps`.
        recompute: "none", or one of the lean levels, which all do the same here.

    Saved, recomputed, exactness: `lowtide.lean.norm_act_conv`. Running statistics move once per call in training.

    Raises:
        ArgumentError: unknown level; fewer than two values per channel in training.
        UnsupportedError: double backward at a lean level; statistics over a process group.
    """
    if check_level(recompute, "norm_act_conv") == "none":
        return plain.norm_act_conv(x, norm, act, conv)
    return lean.norm_act_conv(x, norm, act, conv)


def normalise(x: Tensor, norm: Norm, *, recompute: Level = "pointwise") -> Tensor:
    """The first step of `norm_act_conv`. At a lean level the next step knows how to make its input again."""
    return (plain if check_level(recompute, "normalise") == "none" else lean).normalise(x, norm)


def activate(x: Tensor, act: Activation, *, recompute: Level = "pointwise") -> Tensor:
    """The second step. At a lean level `act.inplace` is honoured where x can be made again, and ignored elsewhere."""
    return (plain if check_level(recompute, "activate") == "none" else lean).activate(x, act)


def convolve(x: Tensor, conv: Conv, *, recompute: Level = "pointwise") -> Tensor:
    """The third step. At a lean level x is not kept if it can be made again."""
    return (plain if check_level(recompute, "convolve") == "none" else lean).convolve(x, conv)


def max_pool(x: Tensor, pool: MaxPool, *, recompute: Level = "pointwise") -> Tensor:
    """The third step. At a lean level x is not kept if it can be made again."""
    return (plain if check_level(recompute, "max_pool") == "none" else lean).max_pool(x, pool)


def concatenate(maps: Sequence[Tensor], *, recompute: Level = "pointwise") -> Tensor:
    """cat(maps, 1). At a lean level the next step keeps the maps that nobody keeps and nobody can make again."""
    return (plain if check_level(recompute, "concatenate") == "none" else lean).concatenate(maps)


def can_be_made_again(x: Tensor) -> bool:
    """Whether x came from a lean `normalise` or `activate` and was not changed since."""
    return lean.made_of(x) is not None


def can_be_spared(x: Tensor) -> bool:
    """Whether x can be made again, or a lean step or `note_kept` said that it is kept for backward as it is."""
    return lean.can_be_spared(x)


def note_kept(x: Tensor) -> None:
    """Say that an operation of ordinary autograd keeps x for its backward."""
    mark_kept(x)
