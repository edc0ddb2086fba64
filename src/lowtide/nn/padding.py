"""Rows of different length in one batch: which positions count."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.sequence_split import SequenceSplit
from lowtide.sgconv_form import check_choice

PaddingSide = Literal["right", "left"]


def valid_positions(
    lengths: Tensor | None, padding_side: PaddingSide, x: Tensor, time: int, split: SequenceSplit | None, of: str
) -> Tensor | None:
    """(B, L) bool: True where a position counts; None when all do.

    Args:
        lengths: (B,) integers 0..L: how many positions of each row count.
        padding_side: where the others are.
        x: the input, B in its first dimension and L in dimension `time`; of a split sequence this rank's part of L.
        split: of a split sequence: where this rank's part begins, and how long the whole is.
        of: the name of the module that was called, for the message.

    Raises:
        ArgumentError: an input without the dimension `time`, lengths of another shape or kind, or an unknown side.
    """
    check_choice(padding_side, ("right", "left"), "padding_side", of)
    if lengths is None:
        return None
    if x.dim() <= time:  # tokens (B, L) have two dimensions
        axes = "(B, H, L)" if time == 2 else "(B, L, ...)"
        raise ArgumentError(describe(expected=f"an input {axes} beside lengths", got=str(tuple(x.shape)), where=of))
    B, L = x.shape[0], x.shape[time]
    if lengths.shape != (B,) or lengths.is_floating_point() or lengths.is_complex():
        got = f"{tuple(lengths.shape)} {str(lengths.dtype).removeprefix('torch.')}"
        raise ArgumentError(describe(expected=f"integers ({B},), one per row", got=got, where=f"{of}(lengths=)"))
    lengths = lengths.to(x.device).unsqueeze(1)
    position = torch.arange(L, device=x.device)
    if split is not None:
        position, L = position + split.offset, split.length
    return position < lengths if padding_side == "right" else position >= L - lengths
