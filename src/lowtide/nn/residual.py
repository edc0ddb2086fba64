"""The residual block of a sequence model: x + SGConv(norm(x)), or norm(x + SGConv(x))."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.functional import State, recomputed, sequence_norm
from lowtide.levels import Level, check_level
from lowtide.nn.batch_norm import SYNC_BATCH_NORMS, call_norm
from lowtide.nn.describe import describe_norm, is_hooked, must_trace
from lowtide.nn.padding import PaddingSide
from lowtide.nn.sgconv import SGConv
from lowtide.parts import BatchNorm
from lowtide.sequence_split import SequenceGroup, SequenceSplit
from lowtide.sgconv_form import check_choice


class SequenceNorm(nn.Module):
    """A norm over the features of (B, H, L), or of one position (B, H).

    "batch": torch's batch norm of the positions that count, in training: padding changes neither the statistics nor the
    running ones, and of a split sequence all ranks' positions count. "layer": layer norm of each position by itself.
    """

    takes_split = True  # so lowtide.distributed.sequence_parallel lets its batch norm pass

    def __init__(self, kind: Literal["batch", "layer"], d_model: int) -> None:
        super().__init__()
        check_choice(kind, ("batch", "layer"), "norm", "SequenceModel")
        self.norm = nn.BatchNorm1d(d_model) if kind == "batch" else nn.LayerNorm(d_model)

    def forward(self, x: Tensor, valid: Tensor | None = None, split: SequenceSplit | None = None) -> Tensor:
        """x (B, H, L) or (B, H); valid (B, L) bool, True where a position counts. Same shape; padding is anything."""
        if isinstance(self.norm, nn.LayerNorm):
            return self.norm(x.transpose(1, -1)).transpose(1, -1)
        if isinstance(self.norm, SYNC_BATCH_NORMS) and split is None and not is_hooked(self.norm):
            described = describe_norm(self.norm, "norm")
            if described.reduce is not None:
                return sequence_norm(x if x.dim() == 3 else x.unsqueeze(2), described, valid).view(x.shape)
        if split is not None and self.training:
            n = self.norm
            moving = (n.running_mean, n.running_var, n.num_batches_tracked)
            norm = BatchNorm(n.weight, n.bias, *moving, n.eps, n.momentum, reduce=split.add_)
            return sequence_norm(x, norm, valid)
        if valid is None or not self.training:
            return call_norm(self.norm, x)
        rows = x.transpose(1, 2)
        out = torch.zeros_like(rows)
        out[valid] = call_norm(self.norm, rows[valid]).to(out.dtype)
        return out.transpose(1, 2)


class ResidualSGConv(nn.Module):
    """(B, H, L) -> (B, H, L): x + SGConv(norm(x)) if `prenorm`, else norm(x + SGConv(x)).

    Saved, in units of the input's bytes: at "layer" 2 (the norm's input and the convolution's), at "pointwise" one more
    per channel of the convolution, at "block" 1; parameters on top. Dropout is SGConv's, behind its activation.
    """

    # set by lowtide.distributed.sequence_parallel: inputs are this rank's part of the time axis
    sequence_group: SequenceGroup | None = None

    def __init__(self, layer: SGConv, *, prenorm: bool, norm: Literal["batch", "layer"]) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.norm = SequenceNorm(norm, layer.d_model)
        self.layer = layer
        self.recompute: Level = layer.recompute

    def set_recompute(self, level: Level) -> None:
        """Change the memory level; nothing else changes."""
        self.recompute = check_level(level, "ResidualSGConv.set_recompute")
        self.layer.set_recompute(level)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
        valid: Tensor | None = None,
        split: SequenceSplit | None = None,
    ) -> Tensor:
        """`lengths`, `padding_side` and `split` as for SGConv; `valid` (B, L) says the same as lengths as a mask."""
        if split is None and self.sequence_group is not None:
            split = self.sequence_group.split(x, 2, lengths)
        if self.recompute == "block" and not must_trace():
            return recomputed(_WithLengths(self, lengths, padding_side, valid, split), x)
        return self.run(x, lengths, padding_side, valid, split)

    def run(
        self,
        x: Tensor,
        lengths: Tensor | None,
        padding_side: PaddingSide,
        valid: Tensor | None,
        split: SequenceSplit | None,
    ) -> Tensor:
        u = self.norm(x, valid, split) if self.prenorm else x
        y = x + self.layer(u, lengths, padding_side, split)
        return y if self.prenorm else self.norm(y, valid, split)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """The next position: (B, H) -> (B, H), with the state of the layer, changed in place."""
        y, state = self.layer.step(self.norm(x_t) if self.prenorm else x_t, state)
        return (x_t + y if self.prenorm else self.norm(x_t + y)), state

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The next T positions: (B, H, T) -> (B, H, T)."""
        if x.shape[2] == 0:
            return x, state
        y, state = self.layer.prefill(self.norm(x) if self.prenorm else x, state)
        return (x + y if self.prenorm else self.norm(x + y)), state


class _WithLengths(nn.Module):
    """A block with all but its input bound, as `recomputed` runs it. The mask is common to all blocks of a model."""

    padding_side: PaddingSide

    def __init__(
        self,
        block: ResidualSGConv,
        lengths: Tensor | None,
        padding_side: PaddingSide,
        valid: Tensor | None,
        split: SequenceSplit | None,
    ) -> None:
        super().__init__()
        self.block, self.padding_side = block, padding_side
        self.lengths, self.valid, self.split = lengths, valid, split
        self.training = block.training

    def forward(self, x: Tensor) -> Tensor:
        return self.block.run(x, self.lengths, self.padding_side, self.valid, self.split)


def make_block(
    d_model: int, l_max: int, prenorm: bool, norm: Literal["batch", "layer"], **sgconv: Any
) -> ResidualSGConv:
    """A block and its convolution; unknown keywords are SGConv's to refuse."""
    return ResidualSGConv(SGConv(d_model, l_max, **sgconv), prenorm=prenorm, norm=norm)


def pool_valid(x: Tensor, pool: Literal["mean", "last"], valid: Tensor | None, padding_side: PaddingSide) -> Tensor:
    """(B, H, L) -> (B, H) over the positions that count; 0 for a row without any."""
    if valid is None:
        return x.mean(-1) if pool == "mean" else x[..., -1]
    count = valid.sum(1)
    if pool == "mean":
        return x.masked_fill(~valid.unsqueeze(1), 0).sum(-1) / count.clamp(min=1).unsqueeze(1).to(x.dtype)
    last = count - 1 if padding_side == "right" else torch.full_like(count, x.shape[2] - 1)
    picked = x.gather(2, last.clamp(min=0).view(-1, 1, 1).expand(-1, x.shape[1], 1)).squeeze(2)
    return picked.masked_fill((count == 0).unsqueeze(1), 0)


def pool_split(
    x: Tensor,
    pool: Literal["mean", "last"],
    lengths: Tensor | None,
    valid: Tensor | None,
    padding_side: PaddingSide,
    split: SequenceSplit,
) -> Tensor:
    """`pool_valid` of a split sequence: (B, H, T) of this rank -> (B, H) of the whole, on every rank."""
    L = split.length
    if pool == "mean":
        kept = x if valid is None else x.masked_fill(~valid.unsqueeze(1), 0)
        dtype = torch.promote_types(x.dtype, torch.float32)  # a sum may leave the range of half precision
        count = L if lengths is None else lengths.to(x.device).clamp(min=1).unsqueeze(1).to(dtype)
        return (split.sum(kept.sum(-1, dtype=dtype)) / count).to(x.dtype)
    last = torch.full((x.shape[0],), L - 1, device=x.device)
    if lengths is not None:
        none = lengths.to(x.device) == 0
        last = (lengths.to(x.device) - 1 if padding_side == "right" else last).masked_fill(none, -1)
    place = last - split.offset
    here = ((place >= 0) & (place < split.held)).unsqueeze(1)
    if split.held == 0:
        return split.sum(x.sum(-1))  # zeros, and a graph that the other ranks' backward finds
    picked = x.gather(2, place.clamp(0, split.held - 1).view(-1, 1, 1).expand(-1, x.shape[1], 1)).squeeze(2)
    return split.sum(picked.masked_fill(~here, 0))
