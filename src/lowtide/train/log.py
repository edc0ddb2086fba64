"""The run's log: `log.csv` with a row per epoch, `log.jsonl` with a line per event (step, epoch, test).

Both only grow. A checkpoint stores their lengths; resuming cuts them back to those lengths, so a line that was written
after the last checkpoint is not there twice.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from lowtide.errors import CheckpointError, describe
from lowtide.train.files import writing

Row = dict[str, int | float | str | None]

EPOCH_COLUMNS = (
    "epoch",
    "step",
    "lr",
    "train_loss",
    "train_error_percent",
    "validation_loss",
    "validation_error_percent",
    "best_validation_error_percent",
    "seconds",
    "samples_per_second",
    "memory_bytes",
    "peak_memory_bytes",
)


class RunLog:
    """Appends rows to the two files of a folder; `lengths` says where a checkpoint left them (None: start anew)."""

    def __init__(self, folder: Path, lengths: dict[str, int] | None = None) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        with ExitStack() as opened:
            for name in ("log.csv", "log.jsonl"):
                file = _open_at(folder / name, 0 if lengths is None else lengths[name])
                self._files[name] = opened.enter_context(file)
            self._opened = opened.pop_all()
        if lengths is None:
            self._append("log.csv", _csv_line(EPOCH_COLUMNS))

    def event(self, kind: str, row: Row) -> None:
        """One line in log.jsonl; an epoch is a row of log.csv too."""
        self._append("log.jsonl", json.dumps({"event": kind, **row}) + "\n")
        if kind == "epoch":
            self._append("log.csv", _csv_line([row[column] for column in EPOCH_COLUMNS]))

    def flush(self) -> dict[str, int]:
        """Bring all lines to the disk; the lengths to store in a checkpoint."""
        for name, file in self._files.items():
            with writing(self._folder / name):
                os.fsync(file.fileno())
        return {name: file.tell() for name, file in self._files.items()}

    def _append(self, name: str, text: str) -> None:
        # unbuffered: a line is in the file as soon as the call returns, so a kill loses none
        content = text.encode()
        with writing(self._folder / name):
            written = self._files[name].write(content)
            if written != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


class NoLog(RunLog):
    """The log of a rank that writes none."""

    def __init__(self) -> None:
        self._files = {}
        self._opened = ExitStack()

    def event(self, kind: str, row: Row) -> None: ...


def _open_at(path: Path, length: int) -> IO[bytes]:
    file = path.open("ab", buffering=0)
    if file.tell() < length:
        found = file.tell()
        file.close()
        raise CheckpointError(
            describe(expected=f"{length} bytes or more, as when the checkpoint was made", got=found, where=str(path))
        )
    file.truncate(length)
    file.seek(length)
    return file


def _csv_line(values: object) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)  # type: ignore[arg-type]
    return text.getvalue()
