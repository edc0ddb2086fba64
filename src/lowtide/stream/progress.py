"""What an out-of-core run has finished: a small file, replaced whole when the data is on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lowtide.errors import DataError, describe

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Progress:
    """Rows of the batch before `row` are finished, of that one the stages before `stage`, and `done` of this one.

    run: tells this run from others: the input file, the weights, the options.
    stage: "" before the first one.
    done: channels or positions.
    """

    run: str
    row: int = 0
    stage: str = ""
    done: int = 0

    @property
    def begun(self) -> bool:
        return (self.row, self.stage) != (0, "")

    def write(self, path: Path) -> None:
        beside = path.with_name(f"{path.name}.partial")
        with beside.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def read_progress(path: Path, run: str) -> Progress:
    """Where the same run stopped, or its beginning if there is no file.

    Raises:
        DataError: the file is another run's, or not one of these.
    """
    if not path.exists():
        return Progress(run)
    fix = f"delete {path} to begin anew, or choose another output"
    try:
        progress = Progress(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(describe(expected="the progress of a run", got=str(error), where=str(path), fix=fix)) from None
    if progress.run != run:
        expected = "the progress of this run"
        got = "that of one with another input, model or options"
        raise DataError(describe(expected=expected, got=got, where=str(path), fix=fix))
    return progress
