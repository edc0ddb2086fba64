"""The fused passes with a pool; maps, forms and vectors as in `interface`.

    max pool       windows of 3, stride 2, padding 1 along every axis of `spatial`: S2 of sizes (s - 1) // 2 + 1
    average pool   windows of 2, stride 2, no padding: S2 of sizes s // 2

One temporary at most: the pool reads the map and writes its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


def max_pooled(spatial: Sequence[int]) -> tuple[int, ...]:
    """Sizes after the max pool."""
    return tuple((size - 1) // 2 + 1 for size in spatial)


def average_pooled(spatial: Sequence[int]) -> tuple[int, ...]:
    """Sizes after the average pool."""
    return tuple(size // 2 for size in spatial)


class Pools(Protocol):
    """The part of a provider that pools."""

    def fuses_pool(self, x: Tensor) -> bool:
        """Whether these passes take a map like x in one sweep, with no temporary of its size.

        Otherwise they should be given a few images at a time.
        """
        ...

    def norm_act_max_pool(self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor) -> None:
        """out (N, C, S2) = max pool of relu(scale * x + shift), x (N, C, S)."""
        ...

    def norm_act_max_pool_sums(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        choice: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """With m the gradient by scale * x + shift that comes of grad (N, C, S2): sum(m) and sum(m * (x - mean)).

        choice (N, C, S2) int32, contiguous in the form of x: the position in 0..S-1 that the pool took (the first of
        equal numbers), -1 where relu stops its gradient.
        """
        ...

    def norm_act_max_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        choice: Tensor,
        scale: Tensor,
        slope: Tensor,
        offset: Tensor,
        spatial: Sequence[int],
        out: Tensor,
    ) -> None:
        """out (N, C, S) = scale * m + slope * x + offset, m as in `norm_act_max_pool_sums`; out may be x itself."""
        ...

    def norm_act_average_pool(
        self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        """out (N, C, S2) = average pool of relu(scale * x + shift), x (N, C, S)."""
        ...

    def norm_act_average_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        total: Tensor | None,
        sums: Tensor,
        sums_x: Tensor,
    ) -> None:
        """With m the gradient by scale * x + shift that comes of grad (N, C, S2):
        total += scale * m (None: not asked for); sums += sum(m); sums_x += sum(m * (x - mean))."""
        ...
