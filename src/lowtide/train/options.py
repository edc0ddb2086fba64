"""The options that every training run has, whatever it trains. A model's own options derive from them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import torch

from lowtide.distributed.world import own_device
from lowtide.errors import ArgumentError, CheckpointError, describe

Precision = Literal["float32", "bf16", "float64"]


@dataclass(frozen=True)
class TrainOptions:
    """What the loop needs to know. Fields that are None have a default that depends on the data."""

    epochs: int | None = None
    """Passes over the training data (default: the data set's published recipe)."""
    batch_size: int = 64
    """Samples per optimiser step, all micro-batches together."""
    accumulate: int = 1
    """Micro-batches per optimiser step: the same step in less memory (batch norm sees a micro-batch)."""
    eval_batch_size: int = 256
    """Samples per batch in validation and test."""
    lr: float = 0.1
    """Highest learning rate."""
    weight_decay: float = 1e-4
    """L2 penalty."""
    seed: int = 0
    """Fixes split, weights, order, augmentation and dropout."""
    precision: Precision = "float32"
    """bf16: autocast, weights stay float32. float64: to check, not to train."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU if there is one."""
    workers: int = 0
    """Processes that prepare batches (0: this one). Changes no number."""
    checkpoint_every: int = 200
    """Optimiser steps between checkpoints; there is one after each epoch too."""
    log_every: int = 10
    """Optimiser steps between lines of the step log."""
    tensorboard: bool = True
    """Also write TensorBoard's event files, if tensorboard is installed."""
    sync_batch_norm: bool = False
    """Under torchrun: batch norm takes the statistics of all processes' samples instead of its own."""
    check_ranks_every: int = 0
    """Under torchrun: optimiser steps between checks that all processes have the same weights (0: never)."""
    rank_timeout: float = 600.0
    """Under torchrun: seconds to wait for another process before giving up."""

    # what a resumed run may change without becoming another run
    changeable: ClassVar[frozenset[str]] = frozenset(
        {
            "eval_batch_size",
            "device",
            "workers",
            "checkpoint_every",
            "log_every",
            "tensorboard",
            "check_ranks_every",
            "rank_timeout",
        }
    )

    def check(self) -> None:
        """Raise `ArgumentError` for a value that no run can have."""
        for name in ("batch_size", "accumulate", "eval_batch_size", "checkpoint_every", "log_every"):
            require(getattr(self, name) >= 1, f"--{name.replace('_', '-')}", "at least 1", getattr(self, name))
        require(self.epochs is None or self.epochs >= 1, "--epochs", "at least 1", self.epochs)
        require(self.lr > 0, "--lr", "a positive number", self.lr)
        require(self.weight_decay >= 0, "--weight-decay", "0 or more", self.weight_decay)
        require(self.workers >= 0, "--workers", "0 or more", self.workers)
        require(self.check_ranks_every >= 0, "--check-ranks-every", "0 or more", self.check_ranks_every)
        require(self.rank_timeout > 0, "--rank-timeout", "a positive number", self.rank_timeout)
        known = get_args(Precision)
        require(self.precision in known, "--precision", f"one of {', '.join(known)}", repr(self.precision))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """The options that `to_json` wrote.

        Raises:
            CheckpointError: they are not options of this class (another version, or another kind of model).
        """
        values: dict[str, Any] = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            differ = ", ".join(sorted(set(values) ^ names))
            raise CheckpointError(
                describe(expected=f"the options of {cls.__name__}", got=f"a difference in {differ}", where=where)
            )
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        return cls(**values)


def require(condition: bool, where: str, expected: str, got: object) -> None:
    """Raise `ArgumentError` unless the condition holds."""
    if not condition:
        raise ArgumentError(describe(expected=expected, got=got, where=where))


Options = TypeVar("Options", bound=TrainOptions)


def check_unchanged(saved: Options, given: Options, where: str) -> None:
    """Raise `ArgumentError` if a resumed run is asked for with options that would make it another run."""
    for field in dataclasses.fields(saved):
        old, new = getattr(saved, field.name), getattr(given, field.name)
        if old != new and field.name not in saved.changeable:
            raise ArgumentError(
                describe(
                    expected=f"--{field.name.replace('_', '-')} {old}, as the run was started",
                    got=new,
                    where=f"resuming {where}",
                    fix="leave it out, or start another run with another --out",
                )
            )


def choose_device(name: str) -> torch.device:
    """The device called `name`; auto is a GPU (under torchrun this process's own), or the CPU where there is none.

    Raises:
        ArgumentError: no such device here.
    """
    if name == "auto":
        return own_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = own_device(torch.device(name))
        torch.empty(0, device=device)
    except ArgumentError:
        raise
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        got = f"{name} ({reason})"
        raise ArgumentError(describe(expected="a device that is here", got=got, where="--device")) from None
    return device
