"""A sequence split over ranks in time, as the layers see it: who holds what, and how it is exchanged.

Rank r holds positions [offset_r, offset_r + T_r) of every row and, while the long convolution runs, the whole length of
a share of the channels. `lowtide.distributed` makes the objects; a layer gets one as an argument.

    B batch, C kernels per feature, H features, L length, T positions of a rank, h features of a rank's share
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Generator, Tensor, device


@dataclass(frozen=True)
class ChannelPart:
    """Some features of every rank's share, exchanged together.

    of_rank: the features of each rank, as slices of all H (they may be empty). own: this rank's, the same way. place:
    this rank's, as a slice of its share.
    """

    of_rank: tuple[slice, ...]
    own: slice
    place: slice


class SequenceSplit(Protocol):
    """One sequence, or a batch of them, split over the ranks of a group. All methods but `parts` are collective."""

    @property
    def offset(self) -> int:
        """This rank's first position."""
        ...

    @property
    def held(self) -> int:
        """T, this rank's positions."""
        ...

    @property
    def length(self) -> int:
        """L, of the whole."""
        ...

    def share(self, H: int) -> slice:
        """The features whose convolution this rank computes."""
        ...

    def parts(self, H: int, row_bytes: int) -> list[ChannelPart]:
        """All features in a few parts, the same number on every rank; `row_bytes`: of one feature, all L positions."""
        ...

    def to_channels(self, x_BHT: Tensor, part: ChannelPart, valid_BT: Tensor | None = None) -> Tensor:
        """(..., H, T) -> (..., w, L): this rank's features of `part`, whole; 0 where `valid` is False; no graph."""
        ...

    def to_time(self, y_BwL: Tensor, part: ChannelPart, out_BHT: Tensor) -> None:
        """(..., w, L) -> (..., H, T): write all ranks' features of `part` at this rank's positions; no graph."""
        ...

    def all_to_channels(self, x_BHT: Tensor) -> Tensor:
        """(..., H, T) -> (..., h, L), with gradient."""
        ...

    def all_to_time(self, y_BhL: Tensor, H: int) -> Tensor:
        """(..., h, L) -> (..., H, T), with gradient."""
        ...

    def add_(self, vector: Tensor) -> None:
        """Sum over the ranks, in place; no graph."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, on every rank, with gradient: that of the sum of what each rank makes of the result."""
        ...

    def replicated(self, y: Tensor) -> Tensor:
        """y, which is the same on every rank and is counted once: its gradient is the mean over the ranks."""
        ...

    def agree_(self, x: Tensor) -> None:
        """Give every rank the values of the first, in place; no graph."""
        ...

    def own_generator(self, on: device) -> Generator:
        """A generator for this rank's positions; it takes one number from the default generator on every rank."""
        ...


class SequenceGroup(Protocol):
    """The ranks that hold one sequence together."""

    def split(self, x: Tensor, time_dim: int, lengths: Tensor | None) -> SequenceSplit:
        """How the batch is split of which `x` is this rank's part. Collective: the ranks tell each other T and B."""
        ...
