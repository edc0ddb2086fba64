"""TensorBoard's event files, for those who watch runs with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowtide.train.log import Row


class EventWriter:
    """Writes nothing; `TensorBoardWriter` does."""

    def add(self, kind: str, row: Row, step: int) -> None: ...


class TensorBoardWriter(EventWriter):
    """Every number of a log row as a scalar called kind/column. Events after `step` (of a killed run) are purged."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, kind: str, row: Row, step: int) -> None:
        for column, value in row.items():
            if isinstance(value, int | float) and column not in ("epoch", "step"):
                self._writer.add_scalar(f"{kind}/{column}", value, step)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def open_event_writer(folder: Path, wanted: bool, step: int) -> Iterator[EventWriter]:
    """A writer for the run in `folder` that goes on after `step`; an idle one if none is wanted or installed."""
    if not wanted or not importlib.util.find_spec("tensorboard"):
        yield EventWriter()
        return
    writer = TensorBoardWriter(folder, step)
    try:
        yield writer
    finally:
        writer.close()
