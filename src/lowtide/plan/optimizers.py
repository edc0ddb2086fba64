"""The optimisers that a plan knows by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lowtide.errors import ArgumentError, describe

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]
OptimizerChoice = OptimizerName | torch.optim.Optimizer | None
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]

_NAMED: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: SGD(parameters, 0.1, weight_decay=1e-4),
    "momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda parameters: Adam(parameters, 1e-3),
    "adamw": lambda parameters: AdamW(parameters, 1e-3),
}


def find_optimizer(choice: object) -> tuple[str, MakeOptimizer | None]:
    """Its name, and how to make one; None for no optimiser.

    Raises:
        ArgumentError: neither a known name nor an optimiser.
    """
    if choice is None:
        return "none", None
    if isinstance(choice, Optimizer):
        kind = type(choice)
        accepted = inspect.signature(kind).parameters
        settings = {name: value for name, value in choice.defaults.items() if name in accepted}
        return kind.__name__, lambda parameters: kind(parameters, **settings)  # type: ignore[call-arg]
    if isinstance(choice, str) and choice in _NAMED:
        return choice, _NAMED[choice]
    expected = f"one of {', '.join(get_args(OptimizerName))}, None or a torch.optim.Optimizer"
    raise ArgumentError(describe(expected=expected, got=repr(choice), where="plan(optimizer)"))
