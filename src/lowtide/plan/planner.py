"""The order of a planning: every level, the fastest mixture that fits, the largest batch, advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.levels import LEVELS, Level
from lowtide.measure.units import format_bytes
from lowtide.plan.advice import advise
from lowtide.plan.batch import largest_batch
from lowtide.plan.budget import parse_budget
from lowtide.plan.choose import choose
from lowtide.plan.optimizers import OptimizerChoice, find_optimizer
from lowtide.plan.parts import Part, find_parts, spread, uniform
from lowtide.plan.predict import Levels, Predictor, Step
from lowtide.plan.prepare import Scope, prepare
from lowtide.plan.profile import Share
from lowtide.plan.result import LevelPrediction, Plan
from lowtide.plan.simulate import Simulation, batch_of

ATTEMPTS = 3  # mixtures that are simulated; each next one aims lower by what the one before was over


def plan(
    model: nn.Module,
    inputs: Any,
    budget: str | int,
    optimizer: OptimizerChoice,
    scope: Scope,
    loss: Callable[[Any], Tensor] | None,
    autocast: torch.dtype | None,
) -> Plan:
    """See `lowtide.plan`."""
    budget_bytes = parse_budget(budget)
    optimizer_name, make = find_optimizer(optimizer)
    arguments = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    batch = batch_of(arguments)
    prepared, report = prepare(model, scope)
    parts = find_parts(prepared)
    simulation = Simulation(prepared, arguments, parts, loss)
    predictor = Predictor(simulation, make, autocast)
    if predictor.parameters > budget_bytes:
        raise ArgumentError(
            describe(
                expected=f"more than the {format_bytes(predictor.parameters)} of the parameters alone",
                got=format_bytes(budget_bytes),
                where="plan(budget)",
            )
        )
    steps = _at_levels(predictor, parts)
    lowest: Level = min(steps, key=lambda level: (steps[level].peak, steps[level].seconds))
    levels, chosen = _within(predictor, parts, steps, budget_bytes)
    if chosen is None:
        levels, chosen = uniform(parts, lowest), steps[lowest]
    fits = chosen.peak <= budget_bytes
    base, at_base = (levels, chosen) if chosen.peak < steps[lowest].peak else (uniform(parts, lowest), steps[lowest])
    max_batch = _largest_batch(predictor, base, at_base, batch, budget_bytes)
    plain = steps[LEVELS[0]].seconds
    result = Plan(
        predicted_peak_bytes=chosen.peak,
        level=_name(levels, parts),
        levels=spread(parts, levels),
        max_batch=max_batch,
        fits=fits,
        shortfall_bytes=max(0, chosen.peak - budget_bytes),
        advice=(),
        budget_bytes=budget_bytes,
        batch=batch,
        optimizer=optimizer_name,
        memory=chosen.memory,
        relative_time=chosen.seconds / plain,
        at_levels=tuple(
            LevelPrediction(level, step.peak, step.kept, step.seconds / plain, step.peak <= budget_bytes)
            for level, step in steps.items()
        ),
        convert_scope=None if report is None else scope,
        notes=_notes(parts, report is not None, scope, simulation.device.type),
    )
    return result if fits else replace(result, advice=advise(result, predictor, levels, scope, autocast))


def _at_levels(predictor: Predictor, parts: list[Part]) -> dict[Level, Step]:
    """A step with every part at each level; of a model without parts there is one."""
    steps: dict[Level, Step] = {}
    seen: dict[tuple[tuple[str, Level], ...], Step] = {}
    for level in LEVELS if parts else LEVELS[:1]:
        levels = uniform(parts, level)
        key = tuple(levels.items())
        if key not in seen:
            seen[key] = predictor.step(levels)
        steps[level] = seen[key]
    return steps


def _within(
    predictor: Predictor, parts: list[Part], steps: dict[Level, Step], budget: int
) -> tuple[Levels, Step | None]:
    """The fastest levels that are simulated to fit, and their step."""
    fitting: list[Level] = [level for level, step in steps.items() if step.peak <= budget]
    best: tuple[Levels, Step | None] = ({}, None)
    if fitting:
        fastest: Level = min(fitting, key=lambda level: (steps[level].seconds, steps[level].peak))
        best = uniform(parts, fastest), steps[fastest]
    shares: dict[Level, dict[str, Share]] = {level: step.shares for level, step in steps.items()}
    order = next(iter(steps.values())).order
    aim = budget - predictor.fixed - next(iter(steps.values())).memory.inputs
    for _ in range(ATTEMPTS if len(parts) > 1 else 0):
        mixed = choose(parts, order, shares, predictor.seconds, aim)
        if mixed is None or any(mixed == uniform(parts, level) for level in fitting):
            break
        step = predictor.step(mixed)
        if step.peak <= budget:
            faster = best[1] is None or step.seconds < best[1].seconds
            best = (mixed, step) if faster else best
            break
        aim -= step.peak - budget
    return best


def _largest_batch(predictor: Predictor, levels: Levels, step: Step, batch: int, budget: int) -> int:
    def simulate(size: int) -> tuple[int, int]:
        found = predictor.step(levels, size)
        return found.peak, found.operators

    return largest_batch(simulate, batch, (step.peak, step.operators), predictor.fixed, budget)


def _name(levels: Levels, parts: list[Part]) -> Any:
    if not levels:
        return "fixed"
    return next((level for level in LEVELS if levels == uniform(parts, level)), "mixed")


def _notes(parts: list[Part], converted: bool, scope: Scope, device: str) -> tuple[str, ...]:
    notes = []
    if converted:
        notes.append(f'the model is planned as lowtide.convert(model, scope="{scope}") makes it; apply() converts it')
    if not parts:
        fix = '; scope="all" finds norms and activations' if scope == "blocks" else ""
        notes.append(f"nothing in the model has a level: it is predicted as it is{fix}")
    if device != "cpu":
        notes.append(f"on {device} what operators take inside, and the allocator's rounding, are not in the figures")
    return tuple(notes)
