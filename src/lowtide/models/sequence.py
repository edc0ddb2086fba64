"""A sequence model: encoder, residual SGConv blocks, pooling or a head per position.

    B batch, L length, H d_model
    (B, L, d_input) or tokens (B, L)  ->  (B, d_output), or (B, L, d_output) without pooling

Source: Li et al. 2022, arXiv 2210.09298, section 4 (blocks and their hyperparameters).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.functional import State
from lowtide.levels import Level, check_level
from lowtide.models.sequence_chunks import ChunkedSequence
from lowtide.nn.padding import PaddingSide, valid_positions
from lowtide.nn.residual import ResidualSGConv, SequenceNorm, make_block, pool_split, pool_valid
from lowtide.sequence_split import SequenceGroup
from lowtide.sgconv_form import check_choice, check_int

Pool = Literal["mean", "last"]


class SequenceModel(ChunkedSequence, nn.Module):
    """Residual SGConv blocks between a linear encoder (or an embedding) and a linear decoder.

    Args:
        d_input: features per position of the input; ignored with `embedding`.
        d_output: features of the output: classes, or the vocabulary.
        d_model: features H inside.
        n_layers: residual blocks.
        l_max: the length that the kernels should reach.
        prenorm: x + SGConv(norm(x)), and one more norm before the decoder; else norm(x + SGConv(x)).
        norm: "batch" (over the positions that count) or "layer".
        dropout, tie_dropout: SGConv's, behind the activation.
        pool: "mean" or "last" of the positions that count, or None: an output per position.
        embedding: vocabulary size; the input is then integers (B, L).
        recompute: memory level, see `lowtide.levels`.
        sgconv: further keywords of `lowtide.nn.SGConv`; a name that it does not know is a TypeError.

    Saved for backward per block, in bytes of one (B, H, L) map: "layer" 2, "pointwise" 2 + channels, "block" 1.

    Example:
        >>> model = SequenceModel(1, 10, d_model=8, n_layers=2, l_max=64, kernel_dim=4, bidirectional=True)
        >>> model(torch.zeros(2, 64, 1)).shape
        torch.Size([2, 10])
    """

    # set by lowtide.distributed.sequence_parallel: inputs are this rank's part of the time axis
    sequence_group: SequenceGroup | None = None

    def __init__(
        self,
        d_input: int,
        d_output: int,
        d_model: int,
        n_layers: int,
        l_max: int,
        prenorm: bool = True,
        norm: Literal["batch", "layer"] = "batch",
        dropout: float = 0.0,
        tie_dropout: bool = False,
        pool: Pool | None = "mean",
        embedding: int | None = None,
        recompute: Level = "pointwise",
        **sgconv: Any,
    ) -> None:
        super().__init__()
        where = "SequenceModel"
        for name, value in (("d_output", d_output), ("d_model", d_model), ("n_layers", n_layers)):
            check_int(value, 1, name, where)
        if embedding is None:
            check_int(d_input, 1, "d_input", where)
        else:
            check_int(embedding, 1, "embedding", where)
        check_choice(pool, ("mean", "last", None), "pool", where)
        if {"transposed", "linear"} & sgconv.keys():
            got = ", ".join(sorted({"transposed", "linear"} & sgconv.keys()))
            raise ArgumentError(
                describe(expected="SGConv keywords without transposed and linear", got=got, where=where)
            )
        self.d_input, self.d_model = d_input, d_model
        self.pool: Pool | None = pool
        self.tokens = embedding is not None
        self.recompute: Level = check_level(recompute, where)
        self.encoder = nn.Linear(d_input, d_model) if embedding is None else nn.Embedding(embedding, d_model)
        keywords = {**sgconv, "dropout": dropout, "tie_dropout": tie_dropout, "recompute": recompute}
        self.blocks = nn.ModuleList(make_block(d_model, l_max, prenorm, norm, **keywords) for _ in range(n_layers))
        self.norm = SequenceNorm(norm, d_model) if prenorm else None
        self.decoder = nn.Linear(d_model, d_output)

    def set_recompute(self, level: Level) -> None:
        """Change the memory level of every block; nothing else changes."""
        self.recompute = check_level(level, "SequenceModel.set_recompute")
        for block in self._blocks():
            block.set_recompute(level)

    def shard_units(self) -> list[nn.Module]:
        """What `lowtide.distributed.shard` gathers one after the other."""
        return [*self.blocks]

    def forward(self, x: Tensor, lengths: Tensor | None = None, padding_side: PaddingSide = "right") -> Tensor:
        """(B, L, d_input), or tokens (B, L), -> (B, d_output), or (B, L, d_output) if `pool` is None.

        Args:
            x: floating, or integers with `embedding`.
            lengths: (B,) integers 0..L: how many positions of each row count. Each row's output is in eval mode that of
                the row alone; batch norm leaves the others out; outputs per position are 0 there.
            padding_side: where the positions that do not count are.

        Raises:
            ArgumentError: an input of another shape or kind.
        """
        self._check(x, 3, "forward")
        split = None if self.sequence_group is None else self.sequence_group.split(x, 1, lengths)
        valid = valid_positions(lengths, padding_side, x, 1, split, "SequenceModel")
        if valid is not None and not self.tokens:
            x = x.masked_fill(~valid.unsqueeze(2), 0)  # what lies at padding, NaN too, must not reach a gradient
        h = self.encoder(x).transpose(1, 2)
        for block in self._blocks():
            h = block(h, lengths, padding_side, valid, split)
        if self.norm is not None:
            h = self.norm(h, valid, split)
        if self.pool is not None:
            if split is None:
                return self.decoder(pool_valid(h, self.pool, valid, padding_side))
            return split.replicated(self.decoder(pool_split(h, self.pool, lengths, valid, padding_side, split)))
        y = self.decoder(h.transpose(1, 2))
        return y if valid is None else y.masked_fill(~valid.unsqueeze(2), 0)

    def initial_state(self, batch_size: int) -> State:
        """The state of a stream that has heard nothing; a tree of tensors (see `lowtide.nn.clone_state`)."""
        self._check_causal("initial_state")
        state: State = {"blocks": [block.layer.initial_state(batch_size) for block in self._blocks()]}
        if self.pool == "mean":
            zeros = self.decoder.weight.new_zeros(1, batch_size, self.d_model)
            state["sum"], state["count"] = zeros, zeros[:, :, :1].clone()
        return state

    @torch.no_grad()
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """The next position, (B, d_input) or tokens (B,): the output (B, d_output) after it, and the state, changed.

        With `pool` the output is that of the sequence so far.

        Raises:
            UnsupportedError: two-sided, or in training mode.
            ArgumentError: an input of another shape or kind.
        """
        self._check_causal("step")
        self._check(x_t, 2, "step")
        h = self.encoder(x_t)
        for block, layer_state in zip(self._blocks(), state["blocks"], strict=True):
            h, _ = block.step(h, layer_state)
        if self.norm is not None:
            h = self.norm(h)
        if self.pool == "mean":
            state["sum"] += h
            state["count"] += 1
            h = (state["sum"] / state["count"]).squeeze(0)
        return self.decoder(h), state

    @torch.no_grad()
    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The next T positions, from any state: x as for `forward`; T outputs, and the state, changed.

        With `pool` there is one output, (B, d_output): that of the sequence so far (T >= 1).
        """
        self._check_causal("prefill")
        self._check(x, 3, "prefill")
        if self.pool is not None and x.shape[1] == 0:
            raise ArgumentError(describe(expected="T >= 1 with a pool", got="T = 0", where="SequenceModel.prefill"))
        h = self.encoder(x).transpose(1, 2)
        for block, layer_state in zip(self._blocks(), state["blocks"], strict=True):
            h, _ = block.prefill(h, layer_state)
        if self.norm is not None and h.shape[2]:
            h = self.norm(h)
        if self.pool is None:
            return self.decoder(h.transpose(1, 2)), state
        if self.pool == "last":
            return self.decoder(h[..., -1]), state
        state["sum"] += h.sum(2)
        state["count"] += h.shape[2]
        return self.decoder((state["sum"] / state["count"]).squeeze(0)), state

    def _blocks(self) -> list[ResidualSGConv]:
        return [block for block in self.blocks if isinstance(block, ResidualSGConv)]

    def _check(self, x: Tensor, dims: int, method: str) -> None:
        where = f"SequenceModel.{method}"
        lead = "(B, L" if dims == 3 else "(B"
        got = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        if self.tokens:
            if x.dim() != dims - 1 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
                raise ArgumentError(describe(expected=f"integer tokens {lead})", got=got, where=where))
        elif x.dim() != dims or x.shape[-1] != self.d_input or not x.is_floating_point():
            raise ArgumentError(describe(expected=f"a floating input {lead}, {self.d_input})", got=got, where=where))

    def _check_causal(self, method: str) -> None:
        where = f"SequenceModel.{method}"
        if any(block.layer.form.bidirectional for block in self._blocks()):
            fix = "build it with bidirectional=False, or call chunk(x, state), whose outputs come later"
            got = "bidirectional=True: every output needs the future"
            raise UnsupportedError(describe(expected="a causal model", got=got, where=where, fix=fix))
        if self.training:
            raise UnsupportedError(
                describe(expected="eval mode", got="training mode", where=where, fix="call model.eval()")
            )
