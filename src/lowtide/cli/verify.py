"""`lowtide verify`: is the candidate the same network as the reference? Exit code 0 if it is, 1 if it is not."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn

import lowtide
from lowtide.cli.shapes import random_inputs
from lowtide.errors import ArgumentError, describe
from lowtide.levels import Level
from lowtide.models.pairs import Pair, converted_pair, default_input, list_pairs, resolve_pair
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
    reference: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="REF")] = None,
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
    convert: bool = False,
    device: str | None = None,
    seed: int = 0,
    list: bool = False,
    json: bool = False,
) -> int:
    """Compare outputs, gradients, buffers, random numbers and the eval output of two networks with the same weights.

    Args:
        reference: module:factory, file.py:factory, or a built-in name: torchvision:densenet121, timm:densenet121,
            monai:densenet121-3d, lowtide:densenet_bc-100-12, lowtide:sgconv; see --list.
        candidate: Likewise. Without it a built-in network's plain form is verified against its lean, memory-efficient
            or converted one.
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
        recompute: Memory level of the lean or converted form where one model is given.
        convert: Verify the one model given against a copy of it converted by lowtide.convert.
        device: cpu or cuda; by default where the weights are.
        seed: Of weights, inputs and random numbers.
        list: Print the built-in names that can be verified by themselves, and what is compared.
        json: Print JSON instead of a table.
    """
    if list:
        _print_pairs(as_json=json)
        return 0
    if reference is None:
        fix = "lowtide verify REFERENCE CANDIDATE, or --list for the built-in names"
        raise ArgumentError(describe(expected="a model", got="none", where="verify", fix=fix))
    if convert and candidate is not None:
        raise ArgumentError(describe(expected="one model with --convert", got="two", where="verify"))
    (plain, lean), names, inputs = _build(reference, candidate, input, recompute, convert, seed)
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


def _build(
    reference: str, candidate: str | None, input: str | None, recompute: Level, convert: bool, seed: int
) -> Built:
    """Both models, how to call them in the report, and their inputs."""
    torch.manual_seed(seed)
    given = None
    if candidate is None:
        pair, given = _converted(reference, recompute) if convert else (_pair(reference, recompute), None)
        models: tuple[Any, Any] = (pair.plain, pair.lean)
        names = (reference, f"{reference} ({pair.form})")
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


def _pair(spec: str, recompute: Level) -> Pair:
    return resolve_pair(spec, recompute, convert=lowtide.convert)


def _converted(spec: str, recompute: Level) -> tuple[Pair, tuple[Any, ...] | None]:
    """Any model that a name leads to, with a converted copy of it, and its inputs if its factory gave them."""
    model, given = resolve_model(spec)
    if not isinstance(model, nn.Module):
        raise ArgumentError(describe(expected="a torch.nn.Module", got=type(model).__name__, where=spec))
    return converted_pair(model, recompute, lowtide.convert), given


def _print_pairs(*, as_json: bool) -> None:
    rows = list_pairs()
    if as_json:
        print(json_format.dumps(rows, indent=2))
        return
    rows = [{"name": "NAME", "plain": "plain", "lean": "in little memory", "input": "default input"}, *rows]
    widths = {key: max(len(row[key]) for row in rows) for key in rows[0]}
    for row in rows:
        print("  ".join(f"{row[key]:<{width}}" for key, width in widths.items()).rstrip())
