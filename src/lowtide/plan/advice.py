"""What would fit where nothing does."""

from __future__ import annotations

import torch

from lowtide.errors import LowtideError
from lowtide.measure.units import format_bytes
from lowtide.plan.predict import Levels, Predictor
from lowtide.plan.result import Plan


def advise(
    plan: Plan, predictor: Predictor, levels: Levels, scope: str, autocast: torch.dtype | None
) -> tuple[str, ...]:
    """One line per way, the ones that suffice first."""
    lines: list[str] = []
    over = f"{format_bytes(plan.shortfall_bytes)} over at level {plan.level}, the lowest of all"
    lines.append(f"it is {over}" if plan.levels else f"it is {format_bytes(plan.shortfall_bytes)} over")
    if plan.max_batch:
        times = -(-plan.batch // plan.max_batch)
        lines.append(
            f"a batch of {plan.max_batch} fits; {times} of them accumulate the gradient of {plan.batch} "
            "(batch norm then sees the smaller batches)"
        )
    else:
        lines.append("no batch fits: parameters, gradients and optimiser need more than the budget leaves")
    half = _under_autocast(predictor, levels) if autocast is None else None
    if half is not None and half < plan.predicted_peak_bytes:
        verdict = "fits" if half <= plan.budget_bytes else "does not fit either"
        lines.append(f"autocast to bfloat16 needs {format_bytes(half)}, which {verdict}")
    if plan.memory.optimizer_state:
        rest = plan.predicted_peak_bytes - plan.memory.optimizer_state
        verdict = "fits" if rest <= plan.budget_bytes else "does not fit either"
        state = format_bytes(plan.memory.optimizer_state)
        lines.append(f'the state of {plan.optimizer} takes {state}: "sgd" has none, and {verdict}')
    if not plan.levels and scope == "blocks":
        lines.append('scope="all" keeps one map per norm and activation in any network')
    return tuple(lines)


def _under_autocast(predictor: Predictor, levels: Levels) -> int | None:
    try:
        return predictor.step(levels, autocast=torch.bfloat16).peak
    except LowtideError:
        return None
