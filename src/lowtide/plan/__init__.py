"""Which memory levels fit a budget: the peak of a training step, predicted without running it.

    plan = lowtide.plan(model, torch.empty(32, 3, 224, 224, device="meta"), budget="4GiB", optimizer="adamw")
    print(plan)
    plan.apply(model)

| file | what |
| --- | --- |
| planner.py, result.py, advice.py | the order of a planning; its result; what would fit instead |
| prepare.py, parts.py | the model as `lowtide.convert` makes it; its parts that have a level |
| simulate.py, quick.py, live.py, inside.py | a step on fake tensors, and the bytes alive during it |
| profile.py, choose.py, speed.py | what each part adds to peak and time; the fastest mixture within a budget |
| chart.py | peak and time of every level, drawn |

This file imports no torch: `lowtide` imports it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lowtide.plan.result import LevelPrediction, Memory, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lowtide.plan.optimizers import OptimizerChoice

__all__ = ["LevelPrediction", "Memory", "Plan", "plan"]


def plan(
    model: nn.Module,
    inputs: Any,
    budget: str | int = "2GiB",
    optimizer: OptimizerChoice = "sgd",
    *,
    scope: Literal["blocks", "all"] = "blocks",
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Plan:
    """Predict the peak of a training step at every memory level, and choose the fastest levels within a budget.

    The model's own forward and backward run on fake tensors: shapes without memory. Nothing of the model changes, and
    nothing of the size of its maps is allocated. A model that is not lowtide's is planned as `lowtide.convert(model,
    scope=scope)` would make it; one that cannot be converted is predicted as it is.

    Args:
        model: any module, on any device, meta included.
        inputs: a tensor or a tuple of positional arguments; only shapes, dtypes and devices are read, so that meta
            tensors serve (a meta tensor means the model's device). The first axis is the batch.
        budget: bytes, or text such as "2GiB", "500MiB", "2GB", for all that a step holds: parameters, buffers, inputs,
            gradients, the optimiser's state, kept maps and transients.
        optimizer: "sgd" (without momentum), "momentum", "adam", "adamw", None for forward and backward alone, or an
            optimiser whose class and settings count.
        scope: as in `lowtide.convert`: "blocks" or "all".
        loss: from the model's result to a scalar; by default the backward starts from the result.
        autocast: dtype of an autocast around the forward.

    Returns:
        A `Plan`; `str()` is a table.

    Raises:
        ArgumentError: a budget that is no size, is not positive, or is smaller than the parameters; an unknown
            optimiser or scope; inputs that the model does not take, or without a batch axis.
        UnsupportedError: a model that cannot be copied, or whose shapes depend on values.
    """
    from lowtide.plan import planner

    return planner.plan(model, inputs, budget, optimizer, scope, loss, autocast)
