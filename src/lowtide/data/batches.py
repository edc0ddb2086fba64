"""Which samples make which optimiser step, and the loader that fetches them.

A batch is asked for by a key that holds all that decides its content: the epoch and the samples' positions. No worker
process carries state, so the content is the same with any number of workers and from any step on.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowtide.data.seeds import generator
from lowtide.errors import DataError, describe


class BatchKey(NamedTuple):
    """What is fetched: samples at `positions` of a split, as they look in `epoch`."""

    epoch: int
    positions: tuple[int, ...]


class Batch(NamedTuple):
    """What the model and the loss see.

    inputs: positional arguments of the model. target: what the loss compares with. indices: (B,) int64, the samples'
    places in the data set's own order, named when something goes wrong. n_targets: how many the loss sums over.
    """

    inputs: tuple[Tensor, ...]
    target: Tensor
    indices: Tensor
    n_targets: int


class BatchDataset(Dataset[Batch]):
    """Maps a `BatchKey` to a `Batch`; `len` is the number of samples."""

    def __len__(self) -> int:
        raise NotImplementedError


class SplitData(Protocol):
    """Three parts without a common sample; the test part is used once, at the end."""

    @property
    def train(self) -> BatchDataset: ...

    @property
    def validation(self) -> BatchDataset | None: ...

    @property
    def test(self) -> BatchDataset: ...


@dataclass(frozen=True)
class EpochPlan:
    """Splits `n_samples`, in a new random order each epoch, into steps of `batch_size`, and each into equal shares.

    A step's samples are shared out over `world_size` ranks times `accumulate` micro-batches; shares differ by at most
    one sample. The tail of an epoch makes a shorter step, unless a share would get fewer than two samples (a batch norm
    has no variance of one): then it is left out, other samples each epoch.
    """

    n_samples: int
    batch_size: int
    seed: int
    accumulate: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 2 * self.shares or self.n_samples < 2 * self.shares:
            raise DataError(
                describe(
                    expected=f"two samples or more for each of {self.shares} shares (ranks x micro-batches)",
                    got=f"a batch of {self.batch_size} from {self.n_samples} training samples",
                    where="batch size",
                    fix="raise --batch-size or the number of samples, or lower --accumulate",
                )
            )

    @property
    def shares(self) -> int:
        return self.accumulate * self.world_size

    @property
    def steps(self) -> int:
        """Optimiser steps per epoch."""
        whole, tail = divmod(self.n_samples, self.batch_size)
        return whole + (tail >= 2 * self.shares)

    def keys(self, epoch: int, rank: int = 0, start: int = 0) -> list[list[BatchKey]]:
        """For each step from `start` on, the keys of this rank's micro-batches."""
        order = torch.randperm(self.n_samples, generator=generator(self.seed, "order", epoch)).tolist()
        steps = []
        for step in range(start, self.steps):
            samples = order[step * self.batch_size : (step + 1) * self.batch_size]
            shares = _share_out(samples, self.shares)[rank * self.accumulate : (rank + 1) * self.accumulate]
            steps.append([BatchKey(epoch, tuple(share)) for share in shares])
        return steps


def _share_out(samples: Sequence[int], shares: int) -> list[Sequence[int]]:
    size, longer = divmod(len(samples), shares)
    cuts = [i * size + min(i, longer) for i in range(shares + 1)]
    return [samples[a:b] for a, b in itertools.pairwise(cuts)]


def evaluation_keys(n_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[BatchKey]:
    """Every sample once, in order; rank r takes the r-th of `world_size` runs of batches."""
    n_batches = math.ceil(n_samples / batch_size)
    mine = _share_out(range(n_batches), world_size)[rank]
    return [BatchKey(0, tuple(range(i * batch_size, min((i + 1) * batch_size, n_samples)))) for i in mine]


def make_loader(
    dataset: BatchDataset, keys: Sequence[BatchKey], workers: int = 0, pin: bool = False
) -> DataLoader[Batch]:
    """Fetches the batches of `keys` in order, in `workers` processes (0: in this one). One item is one whole batch."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin,
        worker_init_fn=_ignore_ctrl_c,
        # a generator of its own: the loader draws a seed when it starts, and must not draw it from the model's numbers
        generator=torch.Generator(),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_ctrl_c(worker: int) -> None:
    # Ctrl-C reaches the whole process group; the loop finishes its step and ends the workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
