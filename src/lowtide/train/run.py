"""A run's folder: options, log, checkpoints, summary. Nothing in an existing run is overwritten unless asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentError, CheckpointError, describe
from lowtide.train.checkpoint import load_checkpoint, save_checkpoint
from lowtide.train.files import make_folder, replacing
from lowtide.train.log import RunLog

OPTIONS = "options.json"


class Run:
    """The folder of one run.

    options.json  what the run was started with         last.pt       newest checkpoint, all that resuming needs
    log.csv       a row per epoch                       best.pt       checkpoint with the least validation error
    log.jsonl     a line per event                      nonfinite.pt  state before a step that was not finite
    summary.json  the result, when the run has ended    tensorboard/  event files, if asked for
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self.nonfinite = folder / "nonfinite.pt"
        self._options = folder / OPTIONS
        self._summary = folder / "summary.json"

    @property
    def exists(self) -> bool:
        return self._options.is_file()

    def check_free(self, overwrite: bool) -> None:
        """Raise `ArgumentError` if starting a run here would overwrite something that was not offered."""
        if not self.folder.exists():
            return
        # a run that was killed while it was created is no run yet, and nothing of value
        begun = self._options.with_name(f"{OPTIONS}.partial")
        if not self.folder.is_dir() or (set(self.folder.iterdir()) - {begun} and not self.exists):
            got = "something else of that name"
            raise ArgumentError(describe(expected="a new folder or a run's folder", got=got, where=str(self.folder)))
        if self.exists and not overwrite:
            raise ArgumentError(
                describe(
                    expected="a new folder",
                    got="a run that is there already",
                    where=str(self.folder),
                    fix="continue it with --resume, replace it with --overwrite, or choose another --out",
                )
            )

    def create(self, kind: str, options: str, overwrite: bool) -> None:
        """Make the folder and write down the options (JSON) of a run of this kind ("train densenet")."""
        self.check_free(overwrite)
        if self.exists:
            shutil.rmtree(self.folder)
        make_folder(self.folder)
        self._write(self._options, {"kind": kind, "options": json.loads(options)})

    def options(self, kind: str) -> str:
        """The options (JSON) that `create` wrote.

        Raises:
            CheckpointError: there is no run here, or it is of another kind.
        """
        if not self.exists:
            fix = "leave --resume out to start it"
            raise CheckpointError(describe(expected="a run", got="none", where=str(self.folder), fix=fix))
        stored = self._read(self._options)
        if stored["kind"] != kind:
            got = f"one of lowtide {stored['kind']}"
            raise CheckpointError(describe(expected=f"a run of lowtide {kind}", got=got, where=str(self.folder)))
        return json.dumps(stored["options"])

    def load_last(self) -> dict[str, Any] | None:
        """The newest checkpoint, or None if the run was ended before its first one."""
        return load_checkpoint(self.last) if self.last.exists() else None

    def save_last(self, content: dict[str, Any]) -> None:
        save_checkpoint(self.last, content)

    def open_log(self, lengths: dict[str, int] | None) -> RunLog:
        return RunLog(self.folder, lengths)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write(self._summary, summary)

    def summary(self) -> dict[str, Any] | None:
        """The result of a run that has ended, else None."""
        return self._read(self._summary) if self._summary.is_file() else None

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        with replacing(path) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(describe(expected="a JSON file", got=error, where=str(path))) from None
