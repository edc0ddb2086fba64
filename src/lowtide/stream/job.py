"""A long job in tiles: output and scratch files, what is done noted behind each tile, taken up again after a kill.

A row of the batch goes through stages, one behind the other; a stage goes over its channels or positions tile by tile.
A tile may be run twice (a kill between its end and the note), so it never reads what it writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowtide.errors import DataError, describe
from lowtide.stream.arrays import DiskArray, scratch_array
from lowtide.stream.progress import Progress, Report, read_progress


@dataclass(frozen=True)
class Stage:
    """`run` over 0..size-1 channels or positions, `tile` at a time."""

    name: str
    size: int
    tile: int
    run: Callable[[slice], None]

    def tiles(self, done: int) -> Iterator[slice]:
        for start in range(done, self.size, self.tile):
            yield slice(start, min(start + self.tile, self.size))


@dataclass(frozen=True)
class Files:
    """What a job writes: `target` in the end, until then NAME.partial and NAME.progress beside it; a scratch file.

    run: tells this job from those with another input, model or options.
    """

    target: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    scratch_folder: Path
    scratch_shape: tuple[int, int] | None
    run: str

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")

    @property
    def progress(self) -> Path:
        return self.target.with_name(f"{self.target.name}.progress")

    @property
    def scratch(self) -> Path:
        return scratch_path(self.target, self.scratch_folder)

    @property
    def scratch_bytes(self) -> int:
        rows, columns = self.scratch_shape or (0, 0)
        return rows * columns * self.dtype.itemsize


def scratch_path(target: Path, folder: Path) -> Path:
    return folder / f"{target.name}.scratch"


def where_it_stopped(files: Files) -> Progress:
    """Where an earlier run of the same job stopped, or the beginning.

    Raises:
        DataError: the leftovers are those of another job, or not all there.
    """
    progress = read_progress(files.progress, files.run)
    if progress.begun:
        for path in (files.partial,) if files.scratch_shape is None else (files.partial, files.scratch):
            if not path.exists():
                fix = f"delete {files.progress} to begin anew"
                expected = "what the earlier run has written so far"
                raise DataError(describe(expected=expected, got="no such file", where=str(path), fix=fix))
    return progress


def run_job(
    files: Files,
    rows: int,
    stages_of: Callable[[int, DiskArray, DiskArray], list[Stage]],
    progress: Progress,
    report: Report,
) -> None:
    """All stages of all rows from `progress` on; stages_of(row, output, scratch), scratch = output where there is none.

    Raises:
        DataError: no room, a folder that cannot be written, files of ours that another process is writing.
    """
    with ExitStack() as stack:
        npy = files.target.suffix == ".npy"
        output = stack.enter_context(scratch_array(files.partial, files.shape, files.dtype, npy=npy))
        scratch = output
        if files.scratch_shape is not None:
            scratch = stack.enter_context(scratch_array(files.scratch, files.scratch_shape, files.dtype))
        for row in range(progress.row, rows):
            for stage in _left(stages_of(row, output, scratch), progress):
                for tile in stage.tiles(progress.done if progress.stage == stage.name else 0):
                    stage.run(tile)
                    # on the disk before it is noted as done
                    output.flush()
                    scratch.flush()
                    progress = Progress(progress.run, row, stage.name, tile.stop)
                    progress.write(files.progress)
                    report(stage.name, row * stage.size + tile.stop, rows * stage.size)
            progress = Progress(progress.run, row + 1)
            progress.write(files.progress)
    # in this order: a run that is killed between any two of them begins anew, and never trusts a file that is gone
    files.progress.unlink()
    files.scratch.unlink(missing_ok=True)
    os.replace(files.partial, files.target)


def _left(stages: list[Stage], progress: Progress) -> list[Stage]:
    names = [stage.name for stage in stages]
    return stages[names.index(progress.stage) :] if progress.stage else stages
