"""Arrays on the disk against numpy's own files, and the refusals."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.errors import ArgumentError, DataError
from lowtide.stream.arrays import Sequence, open_array, parse_shape, scratch_array


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 50), (1, 100_000)])
def test_reads_what_numpy_wrote_and_numpy_reads_what_was_written(tmp_path, dtype, shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    with open_array(tmp_path / "x.npy") as x, scratch_array(tmp_path / "y.npy", shape, x.dtype, npy=True) as y:
        assert x.shape == shape
        for index in range(shape[0]) if len(shape) == 3 else (None,):
            row_x, row_y = (x, y) if index is None else (x.row(index), y.row(index))
            inner = values if index is None else values[index]
            rows, columns = slice(1 % inner.shape[0], inner.shape[0]), slice(2, inner.shape[1] - 1)
            assert np.array_equal(row_x.read(rows, columns), inner[rows, columns])
            whole = slice(0, inner.shape[0]), slice(0, inner.shape[1])
            assert np.array_equal(row_x.read(*whole), inner)
            row_y.write(inner, *whole)
            row_y.write(-inner[rows, columns], rows, columns)
        written = values.copy()
        written[..., rows, columns] *= -1
    assert np.array_equal(np.load(tmp_path / "y.npy"), written)


def test_both_orders_of_the_axes(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for time_last, stored in ((True, values), (False, np.ascontiguousarray(values.T))):
        np.save(tmp_path / "x.npy", stored)
        with open_array(tmp_path / "x.npy") as x, scratch_array(tmp_path / f"y{time_last}", stored.shape, x.dtype) as y:
            features, times = slice(1, 3), slice(0, 2)
            assert np.array_equal(Sequence(x, time_last).read(features, times), values[1:3, :2])
            out = Sequence(y, time_last)
            out.write(values[1:3, :2], features, times)
            assert np.array_equal(out.read(slice(0, 3), slice(0, 4))[1:3, :2], values[1:3, :2])
            assert np.array_equal(out.read(slice(0, 1), slice(0, 4)), np.zeros((1, 4)))


def test_raw_numbers_need_a_shape_that_fits(tmp_path):
    values = np.arange(6, dtype=np.float32)
    values.tofile(tmp_path / "x.raw")
    with open_array(tmp_path / "x.raw", (2, 3)) as x:
        assert np.array_equal(x.read(slice(0, 2), slice(0, 3)), values.reshape(2, 3))
    for shape in ((2, 4), (2, 2)):
        with pytest.raises(DataError, match="bytes for shape"), open_array(tmp_path / "x.raw", shape):
            pass


def test_what_is_not_an_array_is_refused(tmp_path):
    good = tmp_path / "good.npy"
    np.save(good, np.zeros((4, 5), np.float32))
    content = good.read_bytes()
    cases = {
        "absent.npy": None,
        "text.npy": b"channels,samples\n1,2\n",
        "empty.npy": b"",
        "short.npy": content[:-1],
        "damaged.npy": content.replace(b"'shape'", b"'shap!'"),
    }
    for name, bytes_ in cases.items():
        if bytes_ is not None:
            (tmp_path / name).write_bytes(bytes_)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((4, 5), np.float32)))
    np.save(tmp_path / "integers.npy", np.zeros((4, 5), np.int64))
    np.save(tmp_path / "swapped.npy", np.zeros((4, 5), ">f4"))
    for name in (*cases, "fortran.npy", "integers.npy", "swapped.npy"):
        with pytest.raises(DataError, match=name), open_array(tmp_path / name):
            pass


def test_two_writers_of_one_file_are_refused(tmp_path):
    with (
        scratch_array(tmp_path / "y", (2, 2), np.dtype(np.float32)),
        pytest.raises(DataError, match="another process"),
        scratch_array(tmp_path / "y", (2, 2), np.dtype(np.float32)),
    ):
        pass


@pytest.mark.parametrize("text", ["", "3x", "0x4", "axb", "-1x2"])
def test_a_misspelt_shape_is_refused(text):
    assert parse_shape("256x1000000") == (256, 1_000_000)
    with pytest.raises(ArgumentError, match="--shape"):
        parse_shape(text)
