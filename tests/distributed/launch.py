"""Start the ranks of a test as processes, and get back what each found.

    def check(rank, world_size, ...):             # at module level of a test file
        return {"loss": ...}                      # anything that torch.save takes

    found = launch(check, 4, ...)                 # one result per rank; gloo is set up and taken down around `check`

The ranks are forked from a clean process that has imported torch once, so a launch costs a fraction of a second per
rank. Each has one thread, and warnings are errors there too. If one fails, the others are killed and its traceback is
raised here; no process outlives the launch, nor the test run, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

PR_SET_PDEATHSIG = 1
_ranks = multiprocessing.get_context("forkserver")
_ranks.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch.distributed.tensor", "lowtide", "lowtide.train.densenet"),
        *("lowtide.train.sgconv", "lowtide.data.augment", "sklearn.datasets"),
    ]
)


class RankFailed(AssertionError):
    """A rank ended without a result; the message holds its traceback."""


def launch(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 300.0,
    set_up: bool = True,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """[function(rank, world_size, *arguments) of each rank], in a gloo group of `world_size` unless not `set_up`.

    Raises:
        RankFailed: a rank raised, died, or none of that within `timeout_s`. All ranks are dead by then.
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-ranks-") as folder:
        ranks = [
            _ranks.Process(
                target=_run,
                args=(function, rank, world_size, arguments, folder, timeout_s, set_up, environment or {}),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, folder, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        results = [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]
    return results


def _wait(ranks: list[Any], folder: str, until: float) -> None:
    waiting = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while waiting:
        ended = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ended:
            raise RankFailed(f"ranks {sorted(waiting.values())} were not done in time\n{_last_words(folder)}")
        for sentinel in ended:
            rank = waiting.pop(int(sentinel))  # pyright: ignore[reportArgumentType]
            ranks[rank].join()
            if ranks[rank].exitcode != 0:
                time.sleep(0.5)  # the first to raise makes the others raise too: let all of them write
                code = ranks[rank].exitcode
                raise RankFailed(f"rank {rank} ended with exit code {code}\n{_last_words(folder)}")


def _last_words(folder: str) -> str:
    """What the ranks wrote when they failed, the earliest first."""
    files = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(f"--- {path.stem}\n{path.read_text()}" for path in files if path.stat().st_size)


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    arguments: tuple[Any, ...],
    folder: str,
    timeout_s: float,
    set_up: bool,
    environment: dict[str, str],
) -> None:
    # the process that forked this one ends with the test run, even if that is killed; so must this one
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with Path(folder, f"rank {rank}.error").open("w") as errors:
        faulthandler.enable(errors)
        faulthandler.dump_traceback_later(max(1.0, timeout_s - 2.0), file=errors)
        try:
            if set_up:
                distributed.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/rendezvous",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            result = function(rank, world_size, *arguments)
            if set_up:
                distributed.barrier()
                distributed.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(1)  # without tear-down, which could wait for the others
        faulthandler.cancel_dump_traceback_later()
    written = Path(folder, f"{rank}.part")
    torch.save(result, written)
    written.rename(Path(folder, f"{rank}.pt"))
