"""Arrays that stay on the disk: `.npy` or raw numbers, read and written piece by piece with pread and pwrite.

Nothing is mapped into memory, so the file's pages do not count as the process's own. Order is C; the last axis is
contiguous.
"""

from __future__ import annotations

import ast
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.errors import ArgumentError, DataError, describe

FLOATS = ("float16", "float32", "float64")
TOKENS = ("uint8", "int16", "int32", "int64")
_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class DiskArray:
    """A C-ordered array behind `offset` bytes of an open file."""

    file: int
    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def row(self, index: int) -> DiskArray:
        """The array without its first axis, at `index`."""
        inner = DiskArray(self.file, self.path, self.shape[1:], self.dtype, self.offset)
        return DiskArray(self.file, self.path, self.shape[1:], self.dtype, self.offset + index * inner.nbytes)

    def rows(self, start: int, stop: int) -> DiskArray:
        """array[start:stop] of a two-dimensional array."""
        width = self.shape[1]
        offset = self.offset + start * width * self.dtype.itemsize
        return DiskArray(self.file, self.path, (stop - start, width), self.dtype, offset)

    def viewed(self, *shape: int) -> DiskArray:
        """The same numbers, in order, of another shape."""
        view = DiskArray(self.file, self.path, shape, self.dtype, self.offset)
        assert view.nbytes == self.nbytes
        return view

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """array[rows, columns] of a two-dimensional array, both slices with start and stop."""
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.dtype)
        for piece, place in self._pieces(out, rows, columns):
            view = memoryview(piece.data).cast("B")
            done = 0
            while done < len(view):
                got = os.preadv(self.file, [view[done:]], place + done)
                if got == 0:
                    found = f"it ends {len(view) - done} bytes early"
                    raise DataError(describe(expected=f"{self.nbytes} bytes of data", got=found, where=str(self.path)))
                done += got
        return out

    def write(self, values: np.ndarray, rows: slice, columns: slice) -> None:
        """array[rows, columns] = values."""
        values = np.ascontiguousarray(values, self.dtype)
        assert values.shape == (rows.stop - rows.start, columns.stop - columns.start)
        for piece, place in self._pieces(values, rows, columns):
            view = memoryview(piece.data).cast("B")
            done = 0
            while done < len(view):
                done += os.pwrite(self.file, view[done:], place + done)

    def _pieces(self, values: np.ndarray, rows: slice, columns: slice) -> Iterator[tuple[np.ndarray, int]]:
        """`values` in parts that are contiguous in the file, and where each lies."""
        width, itemsize = self.shape[1], self.dtype.itemsize
        if values.size == 0:
            return
        if values.shape[1] == width:
            yield values, self.offset + rows.start * width * itemsize
            return
        for i, row in enumerate(range(rows.start, rows.stop)):
            yield values[i], self.offset + (row * width + columns.start) * itemsize

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fdatasync(self.file)


@dataclass(frozen=True)
class Sequence:
    """Features by samples on the disk, whichever of the two axes comes first there."""

    array: DiskArray
    time_last: bool

    def read(self, features: slice, times: slice) -> np.ndarray:
        """(features, times)."""
        if self.time_last:
            return self.array.read(features, times)
        whole = self.array.read(times, slice(0, self.array.shape[1]))  # one read for each sample would be dearer
        return np.ascontiguousarray(whole[:, features].T)

    def write(self, values: np.ndarray, features: slice, times: slice) -> None:
        if self.time_last:
            self.array.write(values, features, times)
        else:
            self.array.write(values.T, times, features)


@contextmanager
def open_array(
    path: Path, shape: tuple[int, ...] | None = None, dtype: str = "float32", kinds: tuple[str, ...] = FLOATS
) -> Iterator[DiskArray]:
    """An array to read: `.npy` of one of `kinds`, or with `shape` raw numbers of `dtype`.

    Raises:
        DataError: no such file; not a `.npy` file; Fortran order; other numbers; fewer bytes than the shape needs.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DataError(describe(expected="a readable file", got=error.strerror, where=str(path))) from None
    try:
        if shape is None:
            array = _read_header(file, path, kinds)
        else:
            array = DiskArray(file, path, shape, np.dtype(dtype))
        found = os.fstat(file).st_size
        if found < array.offset + array.nbytes or (shape is not None and found != array.nbytes):
            expected = f"{array.offset + array.nbytes} bytes for shape {array.shape} of {array.dtype}"
            raise DataError(describe(expected=expected, got=f"{found}", where=str(path)))
        yield array
    finally:
        os.close(file)


def _read_header(file: int, path: Path, kinds: tuple[str, ...]) -> DiskArray:
    def refuse(got: str, expected: str = "a .npy file") -> DataError:
        fix = f"save it with numpy.save, or give --shape for raw {'bytes' if kinds == TOKENS else 'float32'}"
        return DataError(describe(expected=expected, got=got, where=str(path), fix=fix))

    start = os.pread(file, 12, 0)
    if len(start) < 12 or start[:6] != _MAGIC:
        raise refuse(f"a file that begins with {start[:6]!r}")
    size, at = (struct.unpack("<H", start[8:10])[0], 10) if start[6] == 1 else (struct.unpack("<I", start[8:12])[0], 12)
    try:
        header = ast.literal_eval(os.pread(file, size, at).decode("utf-8"))
        shape, dtype = tuple(int(n) for n in header["shape"]), np.dtype(header["descr"])
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise refuse(f"a damaged header ({error})") from None
    if header.get("fortran_order"):
        raise refuse("Fortran order", "an array in C order")
    if dtype.name not in kinds or not dtype.isnative:
        raise refuse(str(header["descr"]), f"numbers of {', '.join(kinds)}")
    return DiskArray(file, path, shape, dtype, at + size)


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The bytes in front of the numbers, 64-byte aligned as numpy writes them."""
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}).encode()
    padding = -(len(text) + 11) % 64
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(text) + padding + 1) + text + b" " * padding + b"\n"


@contextmanager
def scratch_array(path: Path, shape: tuple[int, ...], dtype: np.dtype, *, npy: bool = False) -> Iterator[DiskArray]:
    """An array to write and to read back, its space taken at once; what an existing file holds stays.

    Raises:
        DataError: the disk has no room, the folder cannot be written, or another process is writing the file.
    """
    header = npy_header(shape, dtype) if npy else b""
    array = DiskArray(-1, path, shape, dtype, len(header))
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(describe(expected="a file that can be written", got=error.strerror, where=str(path))) from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            got = "one that another process is writing"
            raise DataError(describe(expected="a file of our own", got=got, where=str(path))) from None
        size = array.offset + array.nbytes
        try:
            os.truncate(file, size)
            if size:
                os.posix_fallocate(file, 0, size)
        except OSError as error:
            got = f"{error.strerror}"
            raise DataError(describe(expected=f"room for {size} bytes", got=got, where=str(path))) from None
        if header:
            os.pwrite(file, header, 0)
        yield DiskArray(file, path, shape, dtype, len(header))
    finally:
        os.close(file)


def parse_shape(text: str) -> tuple[int, ...]:
    """ "256x1000000" -> (256, 1000000)."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ArgumentError(describe(expected="a shape such as 256x1000000", got=repr(text), where="--shape"))
    return shape
