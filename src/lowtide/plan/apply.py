"""Setting the levels of a plan on a model."""

from __future__ import annotations

from torch import nn

from lowtide.convert import convert
from lowtide.errors import ArgumentError, describe
from lowtide.plan.parts import find_parts, set_levels
from lowtide.plan.result import Plan


def apply(plan: Plan, model: nn.Module) -> None:
    """See `Plan.apply`."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(describe(expected="a torch.nn.Module", got=type(model).__name__, where="plan.apply"))
    if not plan.levels:
        return
    if plan.convert_scope is not None and not find_parts(model):
        convert(model, "layer", plan.convert_scope)
    found = {name for part in find_parts(model) for name in part.modules}
    missing = next((name for name in plan.levels if name not in found), None)
    if missing is not None:
        fix = "apply the plan to the model that it was made for, or to another one of its kind"
        raise ArgumentError(
            describe(expected=f"a part with a level at {missing!r}", got="none", where="plan.apply", fix=fix)
        )
    set_levels(model, plan.levels)
