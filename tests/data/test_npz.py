"""Sequences from an .npz file: what is read, and one clear line for each thing that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.data.batches import BatchKey
from lowtide.data.load_sequences import load_sequences
from lowtide.data.npz import read_npz
from lowtide.errors import ArgumentError, DataError

X = np.random.default_rng(0).normal(size=(40, 6, 2))
Y = np.arange(40) % 3
TOKENS = np.arange(240).reshape(40, 6) % 11


def write(folder: Path, **arrays: object) -> Path:
    path = folder / "rows.npz"
    np.savez(path, **arrays)
    return path


def test_parts_share_no_row_and_hold_them_all(tmp_path: Path) -> None:
    data = load_sequences(f"npz:{write(tmp_path, x=X, y=Y)}", validation=0.25)
    assert data.validation is not None
    rows = torch.cat([data.train.rows, data.validation.rows, data.test.rows])
    assert sorted(rows.tolist()) == list(range(40))
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 9, 4)
    assert (data.format.d_input, data.format.vocabulary, data.format.length) == (2, None, 6)
    assert data.classes == ("class 0", "class 1", "class 2")
    batch = data.train[BatchKey(0, (3, 1))]
    row = data.train.rows[[3, 1]]
    (x,) = batch.inputs
    assert x.dtype == torch.float32
    assert torch.equal(x, torch.from_numpy(X.astype(np.float32))[row])
    assert torch.equal(batch.target, torch.from_numpy(Y)[row])


def test_tokens_lengths_and_a_test_part(tmp_path: Path) -> None:
    lengths = np.arange(40) % 6 + 1
    path = write(tmp_path, x=TOKENS, y=Y, lengths=lengths, x_test=TOKENS[:5] + 1, y_test=Y[:5] + 1)
    data = load_sequences(f"npz:{path}", validation=0.0)
    assert data.validation is None
    assert (len(data.train), len(data.test)) == (40, 5)
    assert (data.format.d_input, data.format.vocabulary, len(data.classes)) == (1, 12, 4)
    positions = tuple(int((data.train.rows == row).nonzero()) for row in (0, 2))  # lengths 1 and 3
    x, n = data.train[BatchKey(0, positions)].inputs
    assert n.tolist() == [1, 3]
    assert torch.equal(x, torch.from_numpy(TOKENS[[0, 2], :3]))
    assert len(data.test[BatchKey(0, (0,))].inputs) == 1


def test_rows_of_single_numbers_are_one_feature(tmp_path: Path) -> None:
    found = read_npz(write(tmp_path, x=X[..., 0], y=Y))
    assert found.rows.x.shape == (40, 6, 1)


def test_what_lies_at_padding_is_not_looked_at(tmp_path: Path) -> None:
    bad = X.copy()
    bad[7, 4] = np.nan
    with pytest.raises(DataError, match=r"x: expected finite numbers, got NaN or Inf in row 7, position 4 \(1 such"):
        read_npz(write(tmp_path, x=bad, y=Y))
    assert read_npz(write(tmp_path, x=bad, y=Y, lengths=np.full(40, 4))).rows.lengths is not None
    with pytest.raises(DataError, match="row 7, position 4"):
        read_npz(write(tmp_path, x=bad, y=Y, lengths=np.full(40, 5)))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"expected an array y, got x"),
        ({"y": Y}, r"expected an array x, got y"),
        ({}, r"expected an array x, got none"),
        ({"x": X, "y": Y, "length": Y}, r"expected arrays x, y, lengths, .*, got length"),
        ({"x": X[:, 0, 0], "y": Y}, r"x: expected numbers \(N, L\) or .*, got \(40,\) float64"),
        ({"x": X[:0], "y": Y[:0]}, r"none of them 0, got \(0, 6, 2\) float64"),
        ({"x": X > 0, "y": Y}, r"got \(40, 6, 2\) bool"),
        ({"x": TOKENS[:, :, None], "y": Y}, r"integer tokens \(N, L\), .*got \(40, 6, 1\) int64"),
        ({"x": TOKENS - 1, "y": Y}, r"x: expected tokens from 0 on, got -1"),
        ({"x": X, "y": Y[:39]}, r"y: expected integers \(40,\), one for each row of x, got \(39,\) int64"),
        ({"x": X, "y": Y / 2}, r"y: expected integers \(40,\), .*float64"),
        ({"x": X, "y": Y - 1}, r"y: expected values of 0 or more, got -1 in row 0 \(14 such values\)"),
        ({"x": X, "y": Y, "lengths": Y}, r"lengths: expected values 1\.\.6, got 0 in row 0 \(14 such values\)"),
        ({"x": X, "y": Y, "lengths": Y + 5}, r"lengths: expected values 1\.\.6, got 7 in row 2"),
        ({"x": X, "y": Y, "x_test": X}, r"expected an array y_test"),
        ({"x": X, "y": Y, "x_test": X[..., :1], "y_test": Y}, r"x_test: expected rows like those of x"),
        ({"x": X, "y": Y, "x_test": TOKENS, "y_test": Y}, r"x_test: expected rows like those of x"),
        ({"x": np.array([{}, 1], dtype=object), "y": Y}, r"expected a whole \.npz file of plain arrays"),
    ],
)
def test_wrong_arrays(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    path = write(tmp_path, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        read_npz(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, y=Y)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"expected a whole \.npz file"):
        read_npz(path)
    path.write_bytes(b"words")
    with pytest.raises(DataError, match=r"expected a whole \.npz file"):
        read_npz(path)
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match=r"expected a whole \.npz file"):
        read_npz(path)
    with pytest.raises(DataError, match=r"missing\.npz: expected an \.npz file, got no such file"):
        load_sequences(f"npz:{tmp_path / 'missing.npz'}")


def test_too_few_rows_for_a_test_part(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected rows for a test part, got 4 rows; add x_test"):
        load_sequences(f"npz:{write(tmp_path, x=X[:4], y=Y[:4])}")


def test_names_and_limits(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"--data: expected one of digits, .*listops, npz:PATH, text:PATH, got 'mnist'"
    ):
        load_sequences("mnist")
    with pytest.raises(ArgumentError, match="--limit-test: expected at least 1, got 0"):
        load_sequences("digits", limit_test=0)
    with pytest.raises(ArgumentError, match=r"--image-side: expected 1\.\.32 for digits, got 33"):
        load_sequences("digits", side=33)
