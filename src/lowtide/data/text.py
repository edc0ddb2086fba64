"""A file as rows of bytes, each to be predicted from those before it: a byte-level language model's data.

The file is cut in three in its own order, training, validation and test part, so no byte is in two of them. A row of
L bytes starts at byte s: x = bytes s .. s+L-1, target = bytes s+1 .. s+L. Training rows start elsewhere in each epoch,
so that no byte is always the first one, of which nothing before is known.

Nothing is decoded: UTF-8, source code or any other file is a row of numbers 0..255.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowtide.data.batches import Batch, BatchDataset, BatchKey
from lowtide.data.seeds import derive_seed
from lowtide.data.sequences import SequenceData, SequenceFormat
from lowtide.errors import ArgumentError, DataError, describe

TEXT = "text:"
VOCABULARY = 256
TEST_FRACTION = 0.05


class TextRows(BatchDataset):
    """Rows of `length` bytes, end to end, of text (N,) uint8; with a `seed` they begin elsewhere in each epoch.

    Bytes behind the last whole row are left out: the last one's target needs one byte more than the rows have. With a
    seed one row less is there, and those of an epoch begin 0 to length bytes further on.
    """

    def __init__(self, text: Tensor, length: int, seed: int | None = None, limit: int | None = None) -> None:
        self.text, self.length, self.seed = text, length, seed
        rows = max(0, (len(text) - 1) // length - (seed is not None))
        self.rows = rows if limit is None else min(rows, limit)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, key: BatchKey) -> Batch:
        shift = 0 if self.seed is None else derive_seed(self.seed, "row starts", key.epoch) % self.length
        starts = torch.tensor(key.positions) * self.length + shift
        windows = self.text[starts.unsqueeze(1) + torch.arange(self.length + 1)].long()
        return Batch((windows[:, :-1],), windows[:, 1:], starts, windows[:, 1:].numel())


def load_text(
    name: str,
    *,
    length: int,
    validation: float = 0.1,
    limit_train: int | None = None,
    limit_test: int | None = None,
    seed: int = 0,
) -> SequenceData:
    """Read text:PATH and cut it: the last twentieth to test, before it the `validation` fraction, before that to train.

    Args:
        name: text:PATH, any file.
        length: bytes in a row.
        validation: fraction of the file.
        limit_train, limit_test: use the first so many rows of these parts only.
        seed: decides where the training rows of each epoch begin.

    Raises:
        DataError: no such file, or too few bytes for two training rows and one of each other part.
        ArgumentError: an option out of range.
    """
    if length < 1:
        raise ArgumentError(describe(expected="at least 1", got=length, where="--text-length"))
    if not 0 <= validation < 1 - TEST_FRACTION:
        expected = f"a fraction of 0 or more and less than {1 - TEST_FRACTION}"
        raise ArgumentError(describe(expected=expected, got=validation, where="--validation"))
    path = Path(name.removeprefix(TEXT))
    try:
        text = torch.from_numpy(np.fromfile(path, np.uint8))
    except OSError as error:
        raise DataError(describe(expected="a text file", got=error.strerror or error, where=str(path))) from None
    n_test, n_validation = int(len(text) * TEST_FRACTION), int(len(text) * validation)
    cuts = (len(text) - n_test - n_validation, n_validation, n_test)
    train, held_out, test = text.split(cuts)
    rows = TextRows(train, length, seed, limit_train)
    checked, tested = TextRows(held_out, length), TextRows(test, length, limit=limit_test)
    if len(rows) < 2 or not len(tested) or (validation and not len(checked)):
        least = f"rows of {length} bytes: two or more to train on, one or more of each other part"
        got = f"{len(text)} bytes: {len(rows)} to train, {len(checked)} to validate, {len(tested)} to test"
        fix = "take a longer text or a smaller --text-length"
        raise DataError(describe(expected=least, got=got, where=str(path), fix=fix))
    return SequenceData(
        name,
        tuple(f"byte {value}" for value in range(VOCABULARY)),
        SequenceFormat(1, VOCABULARY, length, per_position=True),
        rows,
        checked if validation else None,
        tested,
    )
