"""The memory levels: one argument, `recompute`, everywhere.

| level | kept for backward | redone in backward |
| --- | --- | --- |
| "none" | whatever ordinary autograd keeps (the plain implementation) | nothing |
| "pointwise" | features once, and bottleneck or pre-activation maps | norm, activation, concatenation; kernel |
| "layer" | features once (the layer's input) | also the 1x1 convolution, the long convolution |
| "block" | the block's input | the whole block's forward |
"""

from __future__ import annotations

from typing import Literal, get_args

from lowtide.errors import ArgumentError, describe

Level = Literal["none", "pointwise", "layer", "block"]
LEVELS: tuple[Level, ...] = get_args(Level)


def check_level(level: str, where: str) -> Level:
    """Return `level` if it is one of `LEVELS`; raise `ArgumentError` naming `where` and the levels otherwise."""
    for known in LEVELS:
        if level == known:
            return known
    raise ArgumentError(describe(expected=f"recompute to be one of {', '.join(LEVELS)}", got=repr(level), where=where))
