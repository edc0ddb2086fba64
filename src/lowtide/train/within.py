"""`--memory`: the fastest memory level whose training step fits, planned before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lowtide.data.batches import BatchKey, SplitData
from lowtide.errors import ArgumentError, describe
from lowtide.measure.units import format_bytes
from lowtide.plan import plan
from lowtide.plan.budget import parse_budget
from lowtide.train import densenet, sgconv
from lowtide.train.densenet import DenseNetOptions
from lowtide.train.sgconv import SGConvOptions

Options = TypeVar("Options", DenseNetOptions, SGConvOptions)
WHERE = "--memory"


def densenet_within(options: DenseNetOptions, memory: str) -> tuple[DenseNetOptions, str]:
    """The options with the level that fits, and a line that says so. Raises: see `within`."""
    parse_budget(memory, WHERE)
    options.check()
    data = densenet.load_data(options)
    model = densenet.build_model(options, len(data.classes), data.preprocessing)
    optimizer, _ = densenet.build_optimizer(model, options, 1)
    return within(options, memory, model, _inputs(options, data), optimizer)


def sgconv_within(options: SGConvOptions, memory: str) -> tuple[SGConvOptions, str]:
    """As `densenet_within`; rows are planned as if all were as long as the longest."""
    parse_budget(memory, WHERE)
    options.check()
    data = sgconv.load_data(options)
    model = sgconv.build_model(options, len(data.classes), data.format)
    optimizer, _ = sgconv.build_optimizer(model, options, 1)
    x, *lengths = _inputs(options, data)
    x = torch.empty(len(x), data.format.length, *x.shape[2:], dtype=x.dtype, device="meta")
    return within(options, memory, model, (x, *lengths), optimizer)


def _inputs(options: DenseNetOptions | SGConvOptions, data: SplitData) -> tuple[Tensor, ...]:
    """Those of a micro-batch, without numbers."""
    count = min(micro_batch(options), len(data.train))
    batch = data.train[BatchKey(0, tuple(range(count)))]
    numbers = torch.float64 if options.precision == "float64" else torch.float32
    return tuple(
        torch.empty_like(x, device="meta", dtype=numbers if x.is_floating_point() else x.dtype) for x in batch.inputs
    )


def micro_batch(options: DenseNetOptions | SGConvOptions) -> int:
    return -(-options.batch_size // options.accumulate)


def within(
    options: Options, memory: str, model: nn.Module, inputs: tuple[Tensor, ...], optimizer: Optimizer
) -> tuple[Options, str]:
    """The options with the fastest level that fits, evaluation in batches no larger than training's, and a line.

    Raises:
        ArgumentError: no size, or no level fits it; the message says what would.
    """
    budget = parse_budget(memory, WHERE)
    waiting = 0
    if options.accumulate > 1:
        # the other micro-batches are loaded already, and gradients are there from the second one on
        waiting = (options.accumulate - 1) * sum(x.nbytes for x in inputs)
        waiting += sum(p.numel() * p.element_size() for p in model.parameters())
    autocast = torch.bfloat16 if options.precision == "bf16" else None
    found = plan(model, inputs, max(1, budget - waiting), optimizer, loss=_loss, autocast=autocast)
    fitting = [p for p in found.at_levels if p.fits]
    if not fitting:
        least = min(found.at_levels, key=lambda p: p.peak_bytes)
        fix = "use a smaller network"
        if found.max_batch:
            fix = f"--accumulate {-(-options.batch_size // found.max_batch)} or --batch-size {found.max_batch} fits"
        expected = f"{format_bytes(least.peak_bytes + waiting)}, which level {least.level} needs"
        raise ArgumentError(describe(expected=expected, got=memory, where=WHERE, fix=fix))
    best = min(fitting, key=lambda p: (p.relative_time, p.peak_bytes))
    evaluation = min(options.eval_batch_size, micro_batch(options))
    line = (
        f"--memory {memory}: level {best.level}, predicted peak {format_bytes(best.peak_bytes + waiting)} of tensors; "
        f"evaluation in batches of {evaluation}"
    )
    return dataclasses.replace(options, recompute=best.level, eval_batch_size=evaluation), line


def _loss(output: Any) -> Tensor:
    """What `lowtide.train.objective.classification` takes."""
    rows = output.flatten(0, -2)
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device), reduction="sum")
