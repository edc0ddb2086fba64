"""The residual block of a sequence model: x + SGConv(norm(x)), or norm(x + SGConv(x))."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.functional import State, recomputed
from lowtide.levels import Level, check_level
from lowtide.nn.describe import must_trace
from lowtide.nn.sgconv import SGConv
from lowtide.sgconv_form import check_choice

PaddingSide = Literal["right", "left"]


class SequenceNorm(nn.Module):
    """A norm over the features of (B, H, L), or of one position (B, H).

    "batch": torch's batch norm of the positions that count, in training: padding changes neither the statistics nor the
    running ones. "layer": layer norm of each position by itself.
    """

    def __init__(self, kind: Literal["batch", "layer"], d_model: int) -> None:
        super().__init__()
        check_choice(kind, ("batch", "layer"), "norm", "SequenceModel")
        self.norm = nn.BatchNorm1d(d_model) if kind == "batch" else nn.LayerNorm(d_model)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x (B, H, L) or (B, H); valid (B, L) bool, True where a position counts. Same shape; padding is anything."""
        if isinstance(self.norm, nn.LayerNorm):
            return self.norm(x.transpose(1, -1)).transpose(1, -1)
        if valid is None or not self.training:
            return self.norm(x)
        rows = x.transpose(1, 2)
        out = torch.zeros_like(rows)
        out[valid] = self.norm(rows[valid]).to(out.dtype)
        return out.transpose(1, 2)


class ResidualSGConv(nn.Module):
    """(B, H, L) -> (B, H, L): x + SGConv(norm(x)) if `prenorm`, else norm(x + SGConv(x)).

    Saved, in units of the input's bytes: at "layer" 2 (the norm's input and the convolution's), at "pointwise" one more
    per channel of the convolution, at "block" 1; parameters on top. Dropout is SGConv's, behind its activation.
    """

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
        self, x: Tensor, lengths: Tensor | None = None, padding_side: PaddingSide = "right", valid: Tensor | None = None
    ) -> Tensor:
        """`lengths` and `padding_side` as for SGConv; `valid` (B, L) says the same as a mask."""
        if self.recompute == "block" and not must_trace():
            return recomputed(_WithLengths(self, lengths, padding_side, valid), x)
        return self.run(x, lengths, padding_side, valid)

    def run(self, x: Tensor, lengths: Tensor | None, padding_side: PaddingSide, valid: Tensor | None) -> Tensor:
        u = self.norm(x, valid) if self.prenorm else x
        y = x + self.layer(u, lengths, padding_side)
        return y if self.prenorm else self.norm(y, valid)

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

    def __init__(self, block: ResidualSGConv, lengths: Tensor | None, padding_side: PaddingSide, valid: Tensor | None):
        super().__init__()
        self.block, self.padding_side = block, padding_side
        self.lengths, self.valid = lengths, valid
        self.training = block.training

    def forward(self, x: Tensor) -> Tensor:
        return self.block.run(x, self.lengths, self.padding_side, self.valid)


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
