"""A sequence model on blocks of any size, two-sided too: the outputs that are complete, `lookahead` positions late.

A two-sided layer's output waits for all the taps of its reverse kernel. What is added to it in the residual block waits
with it, in a ring of as many positions, and the next block begins when its first input is complete. So n two-sided
layers of K taps look n K positions ahead.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, describe
from lowtide.functional import State, ring_read, ring_write
from lowtide.nn.residual import ResidualSGConv, SequenceNorm


class ChunkedSequence:
    """The methods `chunk_state`, `chunk` and `finish` of `lowtide.models.SequenceModel`; needs pool=None and eval mode.

    Rows of a two-sided model's state cannot be started anew by `reset_rows`: the outputs that were still to come would
    reach the next layer.
    """

    d_model: int
    pool: Literal["mean", "last"] | None
    training: bool
    encoder: nn.Module
    decoder: nn.Linear
    norm: SequenceNorm | None

    def _blocks(self) -> list[ResidualSGConv]:
        raise NotImplementedError

    def _check(self, x: Tensor, dims: int, method: str) -> None:
        raise NotImplementedError

    @property
    def lookahead(self) -> int:
        """How many inputs an output waits for: 0, or the taps of all layers' reverse kernels if two-sided."""
        return sum(block.layer.lookahead for block in self._blocks())

    def chunk_state(self, batch_size: int) -> State:
        """The state of a stream of chunks that has heard nothing; a tree of tensors.

        Per two-sided layer of K taps 3.1 K numbers per feature: twice the taps, and the K inputs that wait.
        """
        self._refuse("chunk_state")
        states = [block.layer.initial_state(batch_size) for block in self._blocks()]
        rings = [
            self.decoder.weight.new_zeros(block.layer.lookahead, batch_size, self.d_model) for block in self._blocks()
        ]
        return {"blocks": [{"layer": s, "late": ring} for s, ring in zip(states, rings, strict=True)]}

    @torch.no_grad()
    def chunk(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The next T >= 0 positions, x as for `forward`: the outputs (B, T', d_output) that are complete by now.

        Output t is that of input t, as `forward` gives it on the whole sequence. The outputs lag behind by `lookahead`
        positions, so the first calls return fewer than T, perhaps none; `finish` returns the rest.

        Raises:
            UnsupportedError: a model with a pool, or in training mode.
            ArgumentError: an input of another shape or kind, or a state of another batch size or model.
        """
        self._refuse("chunk")
        self._check(x, 3, "chunk")
        h = self.encoder(x).transpose(1, 2)
        for block, own in zip(self._blocks(), state["blocks"], strict=True):
            h = _chunk(block, h, own)
        return self._out(h), state

    @torch.no_grad()
    def finish(self, state: State) -> tuple[Tensor, State]:
        """The outputs still due when the input has ended; afterwards the state is that of `chunk_state`."""
        self._refuse("finish")
        batch_size = state["blocks"][0]["layer"]["ring"].shape[1]
        h = self.decoder.weight.new_zeros(batch_size, self.d_model, 0)
        for block, own in zip(self._blocks(), state["blocks"], strict=True):
            h = torch.cat([_chunk(block, h, own), _finish(block, own)], dim=2)
        return self._out(h), state

    def _out(self, h: Tensor) -> Tensor:
        if self.norm is not None and h.shape[2]:
            h = self.norm(h)
        return self.decoder(h.transpose(1, 2))

    def _refuse(self, method: str) -> None:
        where = f"SequenceModel.{method}"
        if self.pool is not None:
            expected, fix = "pool=None: an output per position", "call prefill, which has the output of all so far"
            raise UnsupportedError(describe(expected=expected, got=f"pool={self.pool!r}", where=where, fix=fix))
        if self.training:
            fix = "call model.eval()"
            raise UnsupportedError(describe(expected="eval mode", got="training mode", where=where, fix=fix))


def _chunk(block: ResidualSGConv, x: Tensor, state: State) -> Tensor:
    """(B, H, T) -> (B, H, T'): the block's outputs that are complete."""
    if x.shape[2] == 0:
        return x
    heard = int(state["layer"]["position"])
    y, _ = block.layer.chunk(block.norm(x) if block.prenorm else x, state["layer"])
    return _add(block, _waited(x, heard, state["late"]), y)


def _finish(block: ResidualSGConv, state: State) -> Tensor:
    heard = int(state["layer"]["position"])
    y, _ = block.layer.finish(state["layer"])
    ring = state["late"]
    late = ring_read(ring, heard - y.shape[2], heard).permute(1, 2, 0) if y.shape[2] else y
    out = _add(block, late, y)
    ring.zero_()
    return out


def _waited(x: Tensor, heard: int, ring: Tensor) -> Tensor:
    """Of the inputs up to `heard` in the ring and x behind them, those whose outputs are complete now; x enters."""
    K, T = ring.shape[0], x.shape[2]
    if K == 0:
        return x
    rows = x.permute(2, 0, 1)
    begin, end = max(0, heard - K), max(0, heard + T - K)
    parts = [ring_read(ring, begin, min(end, heard)).clone(), rows[: max(0, end - heard)]]
    ring_write(ring, heard, rows)
    return torch.cat(parts).permute(1, 2, 0)


def _add(block: ResidualSGConv, x: Tensor, y: Tensor) -> Tensor:
    return x + y if block.prenorm or not y.shape[2] else block.norm(x + y)
