"""The idx reader: right values, and one line for every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from data.written_files import idx_bytes, pictures
from lowtide.data.idx import read_idx
from lowtide.errors import DataError


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 4)])
def test_values_are_those_of_the_file(tmp_path: Path, shape: tuple[int, ...], compress: bool) -> None:
    array = pictures(*shape)
    path = tmp_path / "some-idx"
    path.write_bytes(gzip.compress(idx_bytes(array)) if compress else idx_bytes(array))
    read = read_idx(path, len(shape))
    assert read.shape == shape
    assert np.array_equal(read.numpy(), array)


GOOD = idx_bytes(pictures(4, 6, 5))

WRONG = {
    "empty": (b"", "an empty file"),
    "another format": (b"\x89PNG" + GOOD[4:], "89 50 4e 47"),
    "floats": (b"\x00\x00\x0d\x03" + GOOD[4:], "00 00 0d 03"),
    "labels instead of images": (idx_bytes(pictures(9)), "00 00 08 01"),
    "header cut": (GOOD[:9], "9 bytes"),
    "one byte short": (GOOD[:-1], f"{len(GOOD) - 1} bytes"),
    "one byte long": (GOOD + b"\x00", f"{len(GOOD) + 1} bytes"),
    "negative size": (GOOD[:4] + struct.pack(">i", -4) + GOOD[8:], "-4"),
    "size larger than the file": (GOOD[:4] + struct.pack(">i", 2**30) + GOOD[8:], f"{len(GOOD)} bytes"),
    "gzip cut": (gzip.compress(GOOD)[:-9], "gzip"),
    "gzip damaged": (gzip.compress(GOOD)[:20] + b"\xff\xff" + gzip.compress(GOOD)[22:], "gzip"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_with_what_came(tmp_path: Path, case: str) -> None:
    content, said = WRONG[case]
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path, 3)
    message = str(caught.value)
    assert str(path) in message
    assert "expected" in message
    assert said in message
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_idx(tmp_path / "absent", 3)
