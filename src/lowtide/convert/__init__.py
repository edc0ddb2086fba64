"""Lean blocks in the model you already have, in place: same parameters, same keys, and back again.

    report = lowtide.convert(model, recompute="layer")
    model.set_recompute("pointwise")
    lowtide.restore(model)

| file | what |
| --- | --- |
| model.py | the order of a conversion; levels; what the model itself runs |
| find.py, structure.py, obstacles.py | which modules, seen by their parts, and what forbids it |
| probe.py | a candidate and its lean form side by side in float64 |
| swap.py | another forward for a module that stays itself |
| dense.py, described.py | what a converted dense block, transition or chain runs |
| remake.py, mending.py | norms and activations of any network; in-place activations under hooks |

This file imports no torch: `lowtide` imports it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lowtide.convert.report import ConversionReport, Skipped

if TYPE_CHECKING:
    from torch import nn

    from lowtide.levels import Level

__all__ = ["ConversionReport", "Skipped", "convert", "restore"]


def convert(
    model: nn.Module,
    recompute: Level = "pointwise",
    scope: Literal["blocks", "all"] = "blocks",
    strict: bool = True,
) -> ConversionReport:
    """Give the model's dense blocks their lean form, in place.

    Parameters, buffers, keys, hooks and optimisers stay; `model.set_recompute(level)` changes the level later, and
    `lowtide.restore(model)` takes the conversion back. Blocks are found by their parts and channel counts, whatever
    their classes are called, and each is run beside its lean form on a small input in float64 before it is converted.

    Args:
        model: torchvision's, timm's or MONAI's DenseNets, copies of them, or any network.
        recompute: memory level, see `lowtide.levels`.
        scope: "blocks", or "all": also dense chains of any layers, and every batch, instance and group norm with what
            follows it (activation, convolution, max pool): one map is kept in place of two or three.
        strict: whether to raise if nothing can be converted.

    Returns:
        What was converted, and what was left for which reason.

    Raises:
        ArgumentError: unknown level or scope; no module.
        ConversionError: nothing can be converted (if `strict`); the model is converted, scripted or compiled already.
        In either case the model is untouched.
    """
    from lowtide.convert import model as implementation

    return implementation.convert(model, recompute, scope, strict)


def restore(model: nn.Module) -> None:
    """Take a conversion back: every module is of the class that it was, and holds what it held.

    Raises:
        ConversionError: `model` is not what `convert` was called on.
    """
    from lowtide.convert import model as implementation

    implementation.restore(model)
