"""Loss and error of a model over a whole part of a data set."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from lowtide.data.batches import Batch, BatchDataset, evaluation_keys, make_loader
from lowtide.distributed.world import World
from lowtide.train.objective import Objective
from lowtide.train.options import Precision

ALONE = World()


class Evaluation(NamedTuple):
    """Means over all targets."""

    loss: float
    error_percent: float
    n_targets: int


def evaluate(
    model: nn.Module,
    part: BatchDataset,
    objective: Objective,
    batch_size: int,
    precision: Precision = "float32",
    workers: int = 0,
    world: World = ALONE,
) -> Evaluation:
    """Run `model` in eval mode without gradients over every sample once; its modules' modes are put back.

    Each rank of `world` takes a run of whole batches. The batches' sums are added in their order, so the result is, on
    every rank, bit for bit that of one process.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    device = model_device(model)
    mine: list[tuple[float, int, int]] = []
    with torch.no_grad(), autocast(precision, device):
        for batch in make_loader(part, evaluation_keys(len(part), batch_size, world.rank, world.size), workers):
            batch = to_device(batch, device, precision)
            scores = objective(model(*batch.inputs), batch)
            mine.append((float(scores.loss_sum), int(scores.errors), batch.n_targets))
    for module, training in modes:
        module.training = training
    loss_sum, errors, n_targets = 0.0, 0, 0
    for loss, missed, targets in itertools.chain.from_iterable(world.gather(mine)):
        loss_sum += loss
        errors += missed
        n_targets += targets
    return Evaluation(loss_sum / n_targets, 100 * errors / n_targets, n_targets)


def model_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def to_device(batch: Batch, device: torch.device, precision: Precision) -> Batch:
    """The batch where the model is; floating inputs in float64 if that is the run's precision."""
    dtype = torch.float64 if precision == "float64" else None
    inputs = tuple(
        x.to(device, dtype=dtype if x.is_floating_point() else None, non_blocking=True) for x in batch.inputs
    )
    return batch._replace(inputs=inputs, target=batch.target.to(device, non_blocking=True))


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
