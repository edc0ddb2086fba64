"""The processes of one run: who this one is, and what all of them agree on.

torchrun starts the processes; `world_of_ranks` joins them. A process that was started by itself is a world of one: then
nothing here communicates, and no process group exists.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from lowtide.errors import ArgumentError, RankError, describe

Value = TypeVar("Value")

# what torchrun tells each process; a cluster may set one or the other by itself
_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size` processes. Every method is collective: all ranks call it, in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes: log, checkpoints, progress."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64: 8 bytes each. Whole numbers stay exact below 2**53."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def from_main(self, value: Value) -> Value:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value if self.is_main else None]
        distributed.broadcast_object_list(values, src=0)
        return values[0]  # pyright: ignore[reportReturnType]

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by rank 0's, in as few messages as there are dtypes."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():
            flat = torch.cat([tensor.detach().flatten() for tensor in alike])
            distributed.broadcast(flat, src=0)
            for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    @contextmanager
    def first_of_machine_first(self) -> Iterator[None]:
        """The block runs on one process of each machine, then on the others: what it downloads or builds is there."""
        if self.size > 1 and self.local_rank != 0:
            distributed.barrier()
        yield
        if self.size > 1 and self.local_rank == 0:
            distributed.barrier()

    def check_same(self, facts: Mapping[str, object], where: str) -> None:
        """Raise `RankError` on every rank unless all were given the same facts."""
        own = {name: repr(value) for name, value in facts.items()}
        for rank, others in enumerate(self.gather(own)):
            for name in own:
                if others.get(name) != own[name]:
                    said = sorted([(rank, others.get(name)), (self.rank, own[name])])
                    raise RankError(
                        describe(
                            expected=f"the same {name} on every rank",
                            got=", ".join(f"{value} on rank {number}" for number, value in said),
                            where=where,
                            fix="start every rank with the same command and the same data",
                        )
                    )


def started_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return all(name in os.environ for name in _TOLD) and int(os.environ["WORLD_SIZE"]) > 1


def is_main_process() -> bool:
    """Whether this process is rank 0, or alone; known before the ranks are joined."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


def was_restarted() -> bool:
    """Whether torchrun started the ranks anew after one had failed (`--max-restarts`)."""
    return _restarts() > 0


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def own_device(device: torch.device) -> torch.device:
    """`device`, or, of several GPUs, the one of this process: cuda:LOCAL_RANK.

    Raises:
        ArgumentError: there are more processes on this machine than GPUs, or all were given the same GPU.
    """
    if device.type != "cuda" or not started_by_torchrun():
        return device
    fix = "lower --nproc-per-node, or use --device cpu"
    local = int(os.environ["LOCAL_RANK"])
    if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        got = f"{device} for all"
        raise ArgumentError(describe(expected="a GPU per process", got=got, where="--device", fix="use --device cuda"))
    if device.index is not None:
        return device
    if local >= torch.cuda.device_count():
        got = f"{torch.cuda.device_count()} for process {local + 1} of this machine"
        raise ArgumentError(describe(expected="a GPU per process", got=got, where="--device", fix=fix))
    return torch.device("cuda", local)


@contextmanager
def world_of_ranks(device: torch.device, timeout_s: float) -> Iterator[World]:
    """Join the processes that torchrun started, and part from them at the end; alone, a world of one.

    Messages go through gloo, those between GPUs through NCCL. A process group that exists already is used and kept.

    Args:
        device: where this process computes.
        timeout_s: how long a rank waits for the others before it gives up.

    Raises:
        RankError: another rank was lost: it died, or did not answer in time.
    """
    if distributed.is_available() and distributed.is_initialized():
        with _losses_told():
            yield World(distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
        return
    if not started_by_torchrun():
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    with _losses_told():
        store, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
        # torchrun keeps one store through its restarts: without a prefix a rank would find the address of a dead one
        store = distributed.PrefixStore(f"start {_restarts()}", store)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield World(distributed.get_rank(), distributed.get_world_size(), int(os.environ["LOCAL_RANK"]))
    # not after an error: the others may be gone, and would be waited for. A group ends with the last that refers to it,
    # perhaps a DistributedDataParallel in a cycle; a gloo thread that sees the interpreter's end may abort the process
    gc.collect()
    distributed.destroy_process_group()


@contextmanager
def _losses_told() -> Iterator[None]:
    """Turn the failure of a collective into a `RankError`."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_a_collective(error):
            raise
        rank = distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))
        reason = str(error).splitlines()[0]
        raise RankError(
            describe(
                expected="an answer of every rank",
                got=f"none of at least one ({reason})",
                where=f"rank {rank}",
                fix="look for what the lost rank said first; continue with --resume",
            )
        ) from error


def _is_of_a_collective(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors; they name the line of its source
    return isinstance(error, distributed.DistError) or "/gloo/" in str(error)
