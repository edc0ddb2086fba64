"""`lowtide verify`: is the candidate the same network as the reference? Exit code 0 if it is, 1 if it is not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import tyro

from lowtide.cli.shapes import random_inputs
from lowtide.errors import ArgumentError, describe
from lowtide.levels import Level
from lowtide.models.pairs import default_input, resolve_pair
from lowtide.models.resolve import resolve_model
from lowtide.verify import verify as compare

EXIT_DIFFERENT = 1
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Half = Literal["bfloat16", "float16"]
Optimizer = Literal["sgd", "adamw"]

_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def verify(
    reference: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REF")],
    candidate: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CAND")] = None,
    *,
    input: str | None = None,
    steps: int = 3,
    dtype: Dtype | None = None,
    autocast: Half | None = None,
    optimizer: Optimizer | None = None,
    forwards: int = 1,
    accumulate: int = 1,
    backward_twice: bool = False,
    frozen: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    recompute: Level = "pointwise",
    device: str | None = None,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Compare outputs, gradients, buffers, random numbers and the eval output of two networks with the same weights.

    Args:
        reference: module:factory, file.py:factory, or a built-in name: torchvision:densenet121, timm:densenet121,
            monai:densenet121-3d, lowtide:densenet_bc-100-12.
        candidate: Likewise. Without it a built-in network's plain form is verified against its lean or
            memory-efficient one.
        input: Shape of the input: 4x3x64x64; 4x3x64x64,4x10 for two; 2x128:50 for integers below 50. Not needed where
            a factory returns (module, inputs), nor for built-in names.
        steps: Free training steps in float64.
        dtype: float64 alone, or the dtype to verify in besides float64 (by default float32).
        autocast: Verify float32 modules under autocast in this dtype.
        optimizer: Optimiser of the training steps; by default SGD with a rate that first moves the weights by 1 %.
        forwards: Forwards, with different inputs, before each backward.
        accumulate: Forward-backward pairs before each optimiser step.
        backward_twice: Run each backward twice over one graph.
        frozen: Parameters or modules that get no gradient.
        without: Parts to leave out: no_grad_forward, eval, hooks.
        recompute: Memory level of the lean form of lowtide:... names.
        device: cpu or cuda; by default where the weights are.
        seed: Of weights, inputs and random numbers.
        json: Print JSON instead of a table.
    """
    (plain, lean), names, inputs = _build(reference, candidate, input, recompute, seed)
    report = compare(
        plain,
        lean,
        inputs,
        steps=steps,
        dtype=None if dtype is None else getattr(torch, dtype),
        autocast=None if autocast is None else getattr(torch, autocast),
        optimizer=None if optimizer is None else _OPTIMIZERS[optimizer],
        device=device,
        forwards=forwards,
        accumulate=accumulate,
        backward_twice=backward_twice,
        frozen=frozen,
        without=without,
        seed=seed,
    )
    report.reference, report.candidate = names
    print(report.to_json() if json else report)
    return 0 if report.ok else EXIT_DIFFERENT


Built = tuple[tuple[Any, Any], tuple[str, str], tuple[Any, ...]]


def _build(reference: str, candidate: str | None, input: str | None, recompute: Level, seed: int) -> Built:
    """Both models, how to call them in the report, and their inputs."""
    torch.manual_seed(seed)
    given = None
    if candidate is None:
        models: tuple[Any, Any] = resolve_pair(reference, recompute)
        lean = f"recompute={recompute}" if reference.startswith("lowtide:") else "memory_efficient=True"
        names = (reference, f"{reference} ({lean})")
    else:
        (plain, given), (lean_model, other) = resolve_model(reference), resolve_model(candidate)
        models, given, names = (plain, lean_model), other if given is None else given, (reference, candidate)
    shape = input
    if input is None and given is None:
        shape = default_input(reference) or default_input(candidate or "")
    if shape is not None:
        return models, names, random_inputs(shape, seed)
    if given is None:
        fix = "give --input 4x3x64x64, or let the factory return (module, inputs)"
        raise ArgumentError(describe(expected="inputs", got="none", where=reference, fix=fix))
    return models, names, given
