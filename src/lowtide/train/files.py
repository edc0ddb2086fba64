"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lowtide.errors import ArgumentError, CheckpointError, describe

RESUME = "free some space, then continue with --resume"


@contextmanager
def replacing(path: Path, fix: str = RESUME) -> Iterator[IO[bytes]]:
    """A file to write to; when the block ends without an error it takes the name `path`, at once and for good.

    It is written beside `path`, flushed to the disk, renamed over `path`, and the folder's entry is flushed too, so a
    crash at any moment leaves the old file or the new one.

    Raises:
        CheckpointError: the disk is full, or not writable; what was at `path` before is still there.
    """
    temporary = path.with_name(f"{path.name}.partial")
    with writing(path, fix):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path, fix: str = RESUME) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError` that names the file and what to do."""
    try:
        yield
    except OSError as error:
        kept = "; the earlier file is unharmed" if path.exists() else ""
        raise CheckpointError(
            describe(
                expected="to write the file",
                got=f"{error.strerror or error}{kept}",
                where=str(path),
                fix=fix,
            )
        ) from None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; it may exist.

    Raises:
        ArgumentError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = error.strerror
        raise ArgumentError(describe(expected="a folder that can be made", got=got, where=str(folder))) from None


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ErrorKeepingWriter:
    """Hands bytes on to a file and remembers the first `OSError`.

    torch.save writes through C++, which turns a full disk into an error of its own that names neither disk nor file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._write: Callable[[bytes], int] = file.write
        self._flush = file.flush
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self._write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._flush()
