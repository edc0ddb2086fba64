"""`lowtide plan`: which memory levels fit a budget. Exit code 0 if the step fits, 1 if it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lowtide.cli.shapes import parse_shapes
from lowtide.errors import ArgumentError, describe
from lowtide.measure import format_bytes
from lowtide.measure.timeline import PLOT_SUFFIXES, check_output
from lowtide.models.resolve import resolve_model
from lowtide.plan import Plan
from lowtide.plan import plan as predict
from lowtide.plan.budget import parse_budget
from lowtide.plan.chart import save_chart
from lowtide.plan.optimizers import OptimizerName

EXIT_DOES_NOT_FIT = 1


def plan(
    *,
    model: str,
    input: str | None = None,
    budget: str = "2GiB",
    optimizer: OptimizerName | Literal["none"] = "sgd",
    scope: Literal["blocks", "all"] = "blocks",
    autocast: Literal["bfloat16", "float16"] | None = None,
    json: bool = False,
    plot: Path | None = None,
) -> int:
    """Predict the peak of a training step at every memory level, without running it, and choose levels that fit.

    Args:
        model: module:factory, file.py:factory, or a built-in name: torchvision:densenet201, timm:densenet121,
            monai:densenet121-3d, lowtide:densenet_bc-100-12.
        input: Shape of a batch: 32x3x224x224; 4x3x64x64,4x10 for two inputs; 2x128:50 for integers below 50. Not needed
            where a factory returns (module, inputs).
        budget: Memory for parameters, gradients, optimiser state and all maps of a step: 2GiB, 500MiB, 2GB.
        optimizer: sgd (without momentum), momentum, adam, adamw, none.
        scope: What lowtide.convert would convert: blocks, or all (norms and activations of any network).
        autocast: Autocast the forward to this dtype.
        json: Print JSON instead of a table.
        plot: Draw peak and predicted time of every level to this .png, .svg or .pdf file (needs matplotlib).
    """
    parse_budget(budget, "--budget")
    if plot is not None:
        check_output(plot, PLOT_SUFFIXES, "--plot")
    built, given = resolve_model(model)
    if not isinstance(built, nn.Module):
        raise ArgumentError(describe(expected="a torch.nn.Module", got=type(built).__name__, where=model))
    inputs = given if input is None else _shapes(input)
    if inputs is None:
        fix = "give --input 8x3x224x224, or let the factory return (module, inputs)"
        raise ArgumentError(describe(expected="inputs", got="none", where=model, fix=fix))
    result = predict(
        built,
        inputs,
        budget,
        None if optimizer == "none" else optimizer,
        scope=scope,
        autocast=None if autocast is None else getattr(torch, autocast),
    )
    if plot is not None:
        save_chart(result, plot)
    if json:
        print(result.to_json())
    else:
        _show(result, Console(highlight=False))
    return 0 if result.fits else EXIT_DOES_NOT_FIT


def _shapes(text: str) -> tuple[Tensor, ...]:
    """Inputs without numbers; "2x128:50" are integers."""
    made = []
    for part in text.split(","):
        sizes, colon, _ = part.partition(":")
        (shape,) = parse_shapes(sizes)
        made.append(torch.empty(shape, dtype=torch.int64 if colon else torch.float32, device="meta"))
    return tuple(made)


def _show(plan: Plan, console: Console) -> None:
    table = Table(box=box.SIMPLE)
    table.add_column("level")
    for name in ("peak", "kept", "time"):
        table.add_column(name, justify="right")
    table.add_column(f"in {format_bytes(plan.budget_bytes)}")
    for p in plan.at_levels:
        chosen = p.level == plan.level
        table.add_row(
            p.level, format_bytes(p.peak_bytes), format_bytes(p.kept_bytes), f"{p.relative_time:.2f} x",
            "chosen" if chosen and plan.fits else "fits" if p.fits else "no", style="bold" if chosen else None,
        )  # fmt: skip
    if plan.level == "mixed":
        peak, time = format_bytes(plan.predicted_peak_bytes), f"{plan.relative_time:.2f} x"
        table.add_row("mixed", peak, "", time, "chosen", style="bold")
    console.print(table)
    held = [f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in dataclasses.asdict(plan.memory).items() if n]
    lines: list[Any] = [f"at the peak: {', '.join(held)}"]
    if plan.level == "mixed":
        lines.append("levels: " + ", ".join(f"{name} {level}" for name, level in plan.levels.items()))
    if plan.fits:
        lines.append(f"a batch of {plan.batch} fits; the largest that does is {plan.max_batch}")
    else:
        lines.append(f"a batch of {plan.batch} does not fit: {format_bytes(plan.shortfall_bytes)} too much")
    console.print("\n".join([*lines, *plan.advice, *plan.notes]), soft_wrap=True)
