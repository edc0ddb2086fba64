"""Text as rows of bytes: the parts of the file, inputs and targets, where rows begin, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.data.batches import BatchKey
from lowtide.data.load_sequences import load_sequences
from lowtide.errors import ArgumentError, DataError


def write(folder: Path, n: int) -> tuple[str, np.ndarray]:
    """A file of n bytes of all values, and its name as --data has it."""
    content = np.random.default_rng(0).integers(0, 256, n).astype(np.uint8)
    path = folder / "a file.txt"
    path.write_bytes(content.tobytes())
    return f"text:{path}", content


def rows_of(part, epoch: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and places of a part's rows."""
    batch = part[BatchKey(epoch, tuple(range(len(part))))]
    assert batch.n_targets == batch.target.numel()
    assert batch.target.dtype == batch.inputs[0].dtype == torch.int64
    return batch.inputs[0].numpy(), batch.target.numpy(), batch.indices.numpy()


def test_targets_are_the_next_bytes_and_the_parts_share_no_byte(tmp_path: Path) -> None:
    name, content = write(tmp_path, 2000)
    data = load_sequences(name, text_length=30, validation=0.1, seed=3)
    assert data.validation is not None
    parts = (data.train, 0, 1700), (data.validation, 1700, 1900), (data.test, 1900, 2000)
    for part, begin, end in parts:
        x, target, places = rows_of(part)
        for row, place in enumerate(places + begin):
            assert begin <= place
            assert place + 30 < end
            assert np.array_equal(x[row], content[place : place + 30])
            assert np.array_equal(target[row], content[place + 1 : place + 31])
        assert np.array_equal(np.diff(places), np.full(len(part) - 1, 30))
    # every whole row there is; of the training part one less, for it begins elsewhere in each epoch
    assert [len(part) for part, _, _ in parts] == [(1700 - 1) // 30 - 1, (200 - 1) // 30, (100 - 1) // 30]
    assert (data.format.vocabulary, data.format.length, data.format.per_position) == (256, 30, True)
    assert len(data.classes) == 256


def test_training_rows_begin_elsewhere_in_each_epoch_and_the_same_for_a_seed(tmp_path: Path) -> None:
    name, _ = write(tmp_path, 2000)
    first, again, other = (load_sequences(name, text_length=30, seed=seed) for seed in (3, 3, 4))
    starts = [[int(rows_of(data.train, epoch)[2][0]) for epoch in range(40)] for data in (first, again, other)]
    assert starts[0] == starts[1] != starts[2]
    assert set(starts[0]) <= set(range(30))
    assert len(set(starts[0])) > 10
    assert first.validation is not None
    assert np.array_equal(rows_of(first.validation, 0)[2], rows_of(first.validation, 5)[2])


def test_limits(tmp_path: Path) -> None:
    name, _ = write(tmp_path, 2000)
    data = load_sequences(name, text_length=10, limit_train=7, limit_test=2, validation=0)
    assert (len(data.train), data.validation, len(data.test)) == (7, None, 2)


@pytest.mark.parametrize("n", [0, 1, 100, 400])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, n: int) -> None:
    name, _ = write(tmp_path, n)
    with pytest.raises(DataError, match=rf"a file\.txt: expected rows of 50 bytes.* got {n} bytes"):
        load_sequences(name, text_length=50)


def test_the_shortest_text_that_is_taken(tmp_path: Path) -> None:
    """Two rows to train on where a third would fit, one of each other part: 51 bytes of 1,020."""
    name, _ = write(tmp_path, 1020)
    data = load_sequences(name, text_length=50, validation=0.05)
    assert (len(data.validation), len(data.test)) == (1, 1)
    write(tmp_path, 1019)
    with pytest.raises(DataError, match="0 to validate, 0 to test"):
        load_sequences(name, text_length=50, validation=0.05)


def test_what_is_no_file_or_no_option_is_refused(tmp_path: Path) -> None:
    name, _ = write(tmp_path, 2000)
    with pytest.raises(DataError, match=r"absent\.txt: expected a text file, got No such file"):
        load_sequences(f"text:{tmp_path}/absent.txt")
    with pytest.raises(DataError, match="Is a directory"):
        load_sequences(f"text:{tmp_path}")
    for options, where in (({"text_length": 0}, "--text-length"), ({"validation": 0.95}, "--validation")):
        with pytest.raises(ArgumentError, match=where):
            load_sequences(name, **options)
