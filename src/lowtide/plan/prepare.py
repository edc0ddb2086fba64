"""The model that is planned: the one given, or a copy of it converted, with the very same parameters."""

from __future__ import annotations

import copy
from typing import Literal, get_args

from torch import nn

from lowtide.convert import ConversionReport, convert
from lowtide.convert.probe import trusting_parts
from lowtide.errors import ArgumentError, ConversionError, UnsupportedError, describe
from lowtide.plan.parts import find_parts

Scope = Literal["blocks", "all"]


def prepare(model: nn.Module, scope: Scope) -> tuple[nn.Module, ConversionReport | None]:
    """`model` itself if some of it has a level or nothing can be converted, else a converted copy and its report.

    Raises:
        ArgumentError: no module, or an unknown scope. UnsupportedError: the model cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(describe(expected="a torch.nn.Module", got=type(model).__name__, where="plan(model)"))
    if scope not in get_args(Scope):
        expected = f"one of {', '.join(get_args(Scope))}"
        raise ArgumentError(describe(expected=expected, got=repr(scope), where="plan(scope)"))
    if find_parts(model):
        return model, None
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        twin = copy.deepcopy(model, dict(tensors))
    except Exception as error:
        got = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        fix = "remove what cannot be copied from it"
        raise UnsupportedError(
            describe(expected="a model that copy.deepcopy can copy", got=got, where="plan(model)", fix=fix)
        ) from error
    try:
        with trusting_parts():  # `apply` runs them
            report = convert(twin, "layer", scope, strict=False)
    except ConversionError:  # a compiled or scripted model: predicted as it is
        return model, None
    return (twin, report) if report.converted else (model, None)
