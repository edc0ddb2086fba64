"""`torchrun ... -m lowtide ...` as a process, its ranks by number, and the certainty that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self


class Torchrun:
    """Started at once; `with` it: at the end of the block all its processes are dead."""

    def __init__(self, arguments: list[str], output: Path, ranks: int = 2, restarts: int = 0) -> None:
        self.output = output
        # a name that all processes of this start carry in their environment
        self._mark = f"LOWTIDE_TEST_START={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._mark.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}", "-m", "lowtide", *arguments,
        ]  # fmt: skip
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, timeout_s: float = 240.0) -> int:
        """The exit code of torchrun; an error if it is not done in time."""
        return self.process.wait(timeout_s)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def alive(self) -> dict[int, int | None]:
        """Process ids of everything of this start that still runs, with its rank (None: torchrun, a loader)."""
        found: dict[int, int | None] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self._mark in words and state != "Z":
                ranks = [word.partition("=")[2] for word in words if word.startswith("RANK=")]
                found[int(folder.name)] = int(ranks[0]) if ranks else None
        return found

    def kill_rank(self, rank: int) -> bool:
        """kill -9; False if that rank does not run."""
        ids = [pid for pid, number in self.alive().items() if number == rank]
        for pid in ids:
            os.kill(pid, signal.SIGKILL)
        return bool(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
