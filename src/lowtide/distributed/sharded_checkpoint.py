"""Checkpoints of divided models: written by all ranks, read by any other number of them, one included.

A checkpoint is a directory in the format of `torch.distributed.checkpoint`: each rank writes its shards, and who reads
it takes what it needs. Names are those of the undivided model, so that any of its tools can open it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lowtide.errors import CheckpointError, describe


def save_sharded(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> None:
    """Write model, optimiser and `extra` (numbers, tensors, strings) to the directory `path`. Collective.

    The directory appears whole: it is written beside its name and moved there; one that is there already is replaced.
    Of what is not divided (buffers) the first rank's is written.

    Raises:
        CheckpointError: it cannot be written, on any rank; an earlier one at `path` is unharmed.
    """
    path = Path(path)
    beside = path.with_name(f"{path.name}.part")
    if _is_first():
        shutil.rmtree(beside, ignore_errors=True)
    _meet()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state, "extra": extra}
    try:
        with _alone_without_warning():
            checkpoint.save(content, checkpoint_id=beside, no_dist=not _together())
    except (checkpoint.CheckpointException, OSError) as error:
        raise CheckpointError(
            describe(expected="a directory that can be written", got=_reason(error), where=str(path))
        ) from None
    if _is_first():
        old = path.with_name(f"{path.name}.old")
        if path.exists():
            path.rename(old)
        beside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    _meet()


def load_sharded(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read a checkpoint of `save_sharded` into a model, divided or not, and its optimiser; returns `extra`. Collective.

    The number of ranks need not be the one that wrote it; model and optimiser are built as for a new run.

    Raises:
        CheckpointError: no checkpoint there, or one of another model.
    """
    path = Path(path)
    if not (path / ".metadata").is_file():
        raise CheckpointError(describe(expected="a sharded checkpoint", got="no .metadata in it", where=str(path)))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    reader = checkpoint.FileSystemReader(path)
    names = reader.read_metadata().state_dict_metadata
    extra = {name.removeprefix("extra."): None for name in names if name.startswith("extra.")}
    content: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "extra": extra}
    try:
        with _alone_without_warning():
            checkpoint.load(content, storage_reader=reader, no_dist=not _together())
    except (checkpoint.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            describe(expected="a checkpoint of this model and optimiser", got=_reason(error), where=str(path))
        ) from None
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    return content["extra"]


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process is a number of ranks like any other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _is_first() -> bool:
    return not _together() or distributed.get_rank() == 0


def _meet() -> None:
    if _together():
        distributed.barrier()
