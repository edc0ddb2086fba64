"""The result of `lowtide.plan`: what a step would need at every level, and which levels to use."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lowtide.levels import Level
from lowtide.measure.units import format_bytes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Memory:
    """Bytes at the highest moment of a step. The sum is `total`."""

    parameters: int
    buffers: int
    inputs: int
    optimizer_state: int
    gradients: int  # those of parameters that exist at that moment
    kept: int  # of what the forward keeps for backward, what is alive at that moment
    transient: int  # all else: maps that come and go, gradients of maps, what operators take inside

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class LevelPrediction:
    """A step with every part of the model at `level`, or at the nearest lower level that the part has."""

    level: Level
    peak_bytes: int
    kept_bytes: int  # between forward and backward, parameters and inputs left out
    relative_time: float  # predicted, 1.0 for level "none"
    fits: bool


@dataclass(frozen=True)
class Plan:
    """Levels for a budget, and what they lead to; str() is a table, to_json() a JSON object.

    Where nothing fits, the levels are those of the lowest peak, and `advice` says what would fit.
    """

    predicted_peak_bytes: int
    level: Level | Literal["mixed", "fixed"]  # the one of all parts; "fixed": nothing in the model has a level
    levels: dict[str, Level]  # module name -> level, for every module that has one of its own
    max_batch: int  # largest batch that fits with every part at the level of the lowest peak; 0: none does
    fits: bool
    shortfall_bytes: int  # peak over the budget, 0 if it fits
    advice: tuple[str, ...]
    budget_bytes: int
    batch: int
    optimizer: str
    memory: Memory  # what the peak consists of
    relative_time: float  # predicted time of a step, as a multiple of that at level "none"
    at_levels: tuple[LevelPrediction, ...]
    convert_scope: Literal["blocks", "all"] | None  # what `apply` converts the model with, None: nothing
    notes: tuple[str, ...]

    def apply(self, model: nn.Module) -> None:
        """Set the levels on `model`, converting it first if the plan was made for its converted form.

        Raises:
            ArgumentError: the model has not the modules that the plan names. ConversionError: see `lowtide.convert`.
        """
        from lowtide.plan.apply import apply

        apply(self, model)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> list[str]:
    verdict = (
        f"fits: {format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        if plan.fits
        else f"does not fit: {format_bytes(plan.predicted_peak_bytes)}, "
        f"{format_bytes(plan.shortfall_bytes)} over {format_bytes(plan.budget_bytes)}"
    )
    lines = [f"batch {plan.batch}, optimiser {plan.optimizer}, level {plan.level}: {verdict}"]
    lines += [f"largest batch that fits: {plan.max_batch}", ""]
    lines += [f"{'level':<10} {'peak':>10} {'kept':>10} {'time':>6}"]
    lines += [
        f"{p.level:<10} {format_bytes(p.peak_bytes):>10} {format_bytes(p.kept_bytes):>10} {p.relative_time:>5.2f}x"
        f"{'' if p.fits else '  over the budget'}"
        for p in plan.at_levels
    ]
    lines += ["", "at the peak"]
    lines += [
        f"  {format_bytes(nbytes):>10}  {name.replace('_', ' ')}"
        for name, nbytes in dataclasses.asdict(plan.memory).items()
    ]
    if plan.level == "mixed":
        lines += ["", "levels", *(f"  {name or '(the model)'}: {level}" for name, level in plan.levels.items())]
    lines += [f"advice: {line}" for line in plan.advice]
    lines += [f"note: {line}" for line in plan.notes]
    return lines
