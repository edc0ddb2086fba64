"""The collectives of a sequence that is split over ranks in time.

    to_channels   (..., H, T) -> (..., h, L)     every rank gets all positions of its share of the features
    to_time       (..., h, L) -> (..., H, T)     and back; each is the adjoint of the other

Each is one all-to-all with uneven pieces: nothing is padded, and a rank sends what another needs and no more:
(H - h) T numbers one way, h (L - T) the other way, for every row of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from lowtide.sequence_split import ChannelPart

# parts of an exchange: so many that the buffers of one part are small beside the maps, and few enough that each
# message is worth its latency
MOST_PARTS = 8
LEAST_PART_BYTES = 2**20


def shares(total: int, ranks: int) -> list[slice]:
    """`total` things for `ranks` ranks, as even as can be: the first ones get one more.

    >>> shares(5, 3)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    ends = [total // ranks * i + min(i, total % ranks) for i in range(ranks + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _size(x: slice) -> int:
    return x.stop - x.start


@dataclass(frozen=True)
class GroupSplit:
    """A batch of sequences split over `group`: rank r holds `lengths[r]` positions of each row, in order of the ranks.

    See `lowtide.sequence_split.SequenceSplit` for the methods.
    """

    group: Any
    rank: int
    lengths: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.lengths)

    @property
    def held(self) -> int:
        return self.lengths[self.rank]

    @cached_property
    def length(self) -> int:
        return sum(self.lengths)

    @cached_property
    def offset(self) -> int:
        return sum(self.lengths[: self.rank])

    def share(self, H: int) -> slice:
        return shares(H, self.ranks)[self.rank]

    def parts(self, H: int, row_bytes: int) -> list[ChannelPart]:
        all_shares = shares(H, self.ranks)
        most = _size(all_shares[0])
        count = max(1, min(MOST_PARTS, most, most * row_bytes // LEAST_PART_BYTES))
        cuts = [shares(_size(share), count) for share in all_shares]
        return [
            ChannelPart(
                tuple(
                    slice(share.start + cut[i].start, share.start + cut[i].stop)
                    for share, cut in zip(all_shares, cuts, strict=True)
                ),
                _moved(cuts[self.rank][i], all_shares[self.rank].start),
                cuts[self.rank][i],
            )
            for i in range(count)
        ]

    def to_channels(self, x_BHT: Tensor, part: ChannelPart, valid_BT: Tensor | None = None) -> Tensor:
        *lead, _, T = x_BHT.shape
        width = _size(part.own)
        rows = torch.Size(lead).numel()
        sent = _packed([x_BHT[..., features, :] for features in part.of_rank], valid_BT)
        got = self._exchange(
            sent, [rows * _size(features) * T for features in part.of_rank], [rows * width * t for t in self.lengths]
        )
        y_BwL = x_BHT.new_empty(*lead, width, self.length)
        for piece, t in zip(got, self._times, strict=True):
            y_BwL[..., t] = piece.view(*lead, width, _size(t))
        return y_BwL

    def to_time(self, y_BwL: Tensor, part: ChannelPart, out_BHT: Tensor) -> None:
        *lead, width, _ = y_BwL.shape
        T = self.held
        rows = torch.Size(lead).numel()
        sent = _packed([y_BwL[..., t] for t in self._times])
        got = self._exchange(
            sent, [rows * width * t for t in self.lengths], [rows * _size(features) * T for features in part.of_rank]
        )
        for piece, features in zip(got, part.of_rank, strict=True):
            out_BHT[..., features, :] = piece.view(*lead, _size(features), T)

    def all_to_channels(self, x_BHT: Tensor) -> Tensor:
        return _ToChannels.apply(x_BHT, self)

    def all_to_time(self, y_BhL: Tensor, H: int) -> Tensor:
        return _ToTime.apply(y_BhL, self, H)

    def add_(self, vector: Tensor) -> None:
        distributed.all_reduce(vector, group=self.group)

    def sum(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self)

    def replicated(self, y: Tensor) -> Tensor:
        return _Replicated.apply(y, self.ranks)

    def agree_(self, x: Tensor) -> None:
        distributed.broadcast(x, group=self.group, group_src=0)

    def own_generator(self, on: torch.device) -> torch.Generator:
        seed = torch.randint(2**62, (1,), device=on)
        self.agree_(seed)
        return torch.Generator(on).manual_seed(int(seed) + self.rank)

    @cached_property
    def _times(self) -> list[slice]:
        """The positions of every rank."""
        ends = [sum(self.lengths[:i]) for i in range(self.ranks + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def _exchange(self, sent: Tensor, sizes: Sequence[int], sizes_got: Sequence[int]) -> tuple[Tensor, ...]:
        """Send sizes[r] numbers to rank r, in order; what came from each rank, in order."""
        got = sent.new_empty(sum(sizes_got))
        distributed.all_to_all_single(got, sent, list(sizes_got), list(sizes), group=self.group)
        return got.split(list(sizes_got))


def _packed(pieces: Sequence[Tensor], valid_BT: Tensor | None = None) -> Tensor:
    """All numbers of the pieces (B, w, T), one piece behind the other; 0 where `valid` is False."""
    packed = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    for piece, place in zip(pieces, packed.split([piece.numel() for piece in pieces]), strict=True):
        place = place.view(piece.shape).copy_(piece)
        if valid_BT is not None:
            place.masked_fill_(~valid_BT.unsqueeze(1), 0)
    return packed


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


class _ToChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHT: Tensor, split: GroupSplit) -> Tensor:
        ctx.split, ctx.H = split, x_BHT.shape[-2]
        (part,) = split.parts(ctx.H, 0)
        return split.to_channels(x_BHT, part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ToTime.apply(grads[0], ctx.split, ctx.H), None


class _ToTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BhL: Tensor, split: GroupSplit, H: int) -> Tensor:
        ctx.split = split
        (part,) = split.parts(H, 0)
        out = y_BhL.new_empty(*y_BhL.shape[:-2], H, split.held)
        split.to_time(y_BhL, part, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _ToChannels.apply(grads[0], ctx.split), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: GroupSplit) -> Tensor:
        ctx.split = split
        total = x.clone(memory_format=torch.contiguous_format)
        split.add_(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.split), None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None
