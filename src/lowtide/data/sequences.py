"""Labelled sequences: sources of rows, how a row is written for the network, and batches, padded where lengths differ.

A batch's inputs are (x,), or (x, lengths) where rows differ in length: x is (B, L, d_input) float32, or (B, L) int64
tokens; lengths is (B,) int64, and what lies behind a row's length is padding, on the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.data.batches import Batch, BatchDataset, BatchKey


class SequenceSource(Protocol):
    """Rows and their classes, wherever they are kept."""

    @property
    def labels(self) -> Tensor:
        """(N,) int64."""
        ...

    def inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What the model is given for these rows: (x,) or (x, lengths)."""
        ...


@dataclass(frozen=True)
class PixelRows:
    """Pictures read row by row, one grey value per position, scaled to 0..1, minus the mean, over the deviation.

    pixels: (N, L) uint8.
    """

    pixels: Tensor
    labels: Tensor
    mean: float
    std: float

    def inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        x = self.pixels[rows].to(torch.float32).div_(255).sub_(self.mean).div_(self.std)
        return (x.unsqueeze(2),)


@dataclass(frozen=True)
class TokenRows:
    """Tokens end to end: row i is tokens[ends[i] : ends[i + 1]], ends (N + 1,) int64."""

    tokens: Tensor
    ends: Tensor
    labels: Tensor

    def inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        starts = self.ends[rows]
        lengths = self.ends[rows + 1] - starts
        x = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            x[i, :length] = self.tokens[start : start + length]
        return x, lengths


@dataclass(frozen=True)
class ArrayRows:
    """Rows of one array: x (N, L, d_input) float32 or (N, L) int64; lengths (N,) int64, or None if all are full.

    A batch ends where its longest row does.
    """

    x: Tensor
    labels: Tensor
    lengths: Tensor | None

    def inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        if self.lengths is None:
            return (self.x[rows],)
        lengths = self.lengths[rows]
        return self.x[rows, : int(lengths.max())], lengths


class SequenceBatches(BatchDataset):
    """Rows of a source, in the order of `rows`."""

    def __init__(self, source: SequenceSource, rows: Tensor) -> None:
        self.source = source
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: BatchKey) -> Batch:
        rows = self.rows[list(key.positions)]
        return Batch(self.source.inputs(rows), self.source.labels[rows], rows, len(rows))


@dataclass(frozen=True)
class SequenceFormat:
    """What a row is to the network; stored in checkpoints.

    d_input: features per position (1 for tokens). vocabulary: number of tokens, None for numbers. length: of the
    longest row. mean, std: that pixels are normalised by, of the training part. per_position: the target is a class for
    every position (the next token), not one for the row.
    """

    d_input: int
    vocabulary: int | None
    length: int
    mean: float = 0.0
    std: float = 1.0
    per_position: bool = False


@dataclass(frozen=True)
class SequenceData:
    """One data set, ready for training: three parts that share no row. `validation` may be empty (None)."""

    name: str
    classes: tuple[str, ...]
    format: SequenceFormat
    train: BatchDataset
    validation: BatchDataset | None
    test: BatchDataset
