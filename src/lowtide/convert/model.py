"""`convert` and `restore`: find, check on copies, then exchange the classes of what was found."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import torch
from torch import nn

from lowtide.convert import dense as dense
from lowtide.convert.find import Action, Finder
from lowtide.convert.mending import Mending, has_backward_hook
from lowtide.convert.public_sgconv import SGCONV
from lowtide.convert.remake import Remaking, is_remaking
from lowtide.convert.report import ConversionReport
from lowtide.convert.swap import Swapped, has_kind, is_swapped, kind, state_of, swap, swapped_modules, unswap
from lowtide.errors import ArgumentError, ConversionError, describe
from lowtide.levels import Level, check_level
from lowtide.nn.describe import must_trace

Scope = Literal["blocks", "all"]
MODEL, PART = "model", "part"


@kind(PART)
class RemakingPart(Swapped):
    """A module with children, in a model converted with scope "all": its calls of norms and the like run lean."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if state_of(self).level == "none" or must_trace() or not torch.is_grad_enabled() or is_remaking():
            return run(*args, **kwargs)
        with Remaking():
            return run(*args, **kwargs)


@kind(MODEL)
class ConvertedModel(Swapped):
    """The model that `convert` was called on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if must_trace() or not torch.is_grad_enabled() or not has_backward_hook(self):
            return run(*args, **kwargs)
        with Mending():
            return run(*args, **kwargs)

    def set_recompute(self, level: Level) -> None:
        """Change what is kept for backward in every converted part; "none" is the plain way."""
        check_level(level, "set_recompute")
        assert isinstance(self, nn.Module)
        for module in swapped_modules(self):
            state_of(module).level = level


def convert(
    model: nn.Module, recompute: Level = "pointwise", scope: Scope = "blocks", strict: bool = True
) -> ConversionReport:
    """See `lowtide.convert`."""
    where = "convert"
    level = check_level(recompute, where)
    if scope not in get_args(Scope):
        raise ArgumentError(
            describe(expected=f"scope to be one of {', '.join(get_args(Scope))}", got=repr(scope), where=where)
        )
    _check_model(model)
    finder = Finder(model, level, everything=scope == "all")
    finder.run()
    if not finder.actions:
        if strict:
            raise ConversionError(_nothing(model, finder, scope))
        return ConversionReport(skipped=tuple(finder.skipped))
    _apply(model, finder.actions, level, everything=scope == "all")
    converted = [action for action in finder.actions if action.kind != dense.FEATURES]
    return ConversionReport(
        tuple(action.path for action in converted),
        tuple(finder.skipped),
        {action.path: action.label for action in converted},
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(describe(expected="a torch.nn.Module", got=type(model).__name__, where="convert"))
    for name, module in model.named_modules():
        if is_swapped(module):
            raise ConversionError(
                describe(
                    expected="a model that is not converted",
                    got=f"one whose {name or 'root'} is",
                    where="convert",
                    fix="change the level with model.set_recompute, or call lowtide.restore(model) first",
                )
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(
                describe(
                    expected="a model in Python",
                    got=f"a scripted module at {name or 'the root'}",
                    where="convert",
                    fix="convert the model before torch.jit.script",
                )
            )
        if type(module).__name__ == "OptimizedModule":
            raise ConversionError(
                describe(
                    expected="a model that is not compiled",
                    got=f"a compiled module at {name or 'the root'}",
                    where="convert",
                    fix="convert the model before torch.compile",
                )
            )


def _nothing(model: nn.Module, finder: Finder, scope: Scope) -> str:
    got = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in finder.skipped)
    fix = 'scope="all" keeps one map per norm and activation in any network' if scope == "blocks" else "nothing is lost"
    if not got:
        wanted = "dense blocks or long convolutions"
        if scope == "all":
            wanted = "dense blocks, long convolutions, norms or activations"
        got = f"a {type(model).__name__} without {wanted}"
    return describe(expected="something to convert", got=got, where="convert", fix=fix)


def _apply(model: nn.Module, actions: list[Action], level: Level, *, everything: bool) -> None:
    for action in actions:
        if action.kind:
            swap(model.get_submodule(action.path), action.kind, action.plan, level)
    if everything:
        for module in model.modules():
            if has_forward(module) and (module._modules or module is model) and not _runs_alone(module):
                swap(module, PART, None, level)
    swap(model, MODEL, None, level)


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _runs_alone(module: nn.Module) -> bool:
    """A converted block, transition or long convolution is one node, with nothing to remake inside."""
    return any(has_kind(module, name) for name in (dense.BLOCK, dense.TRANSITION, dense.CHAIN, SGCONV))


def restore(model: nn.Module) -> None:
    """See `lowtide.restore`."""
    if not isinstance(model, nn.Module) or not has_kind(model, MODEL):
        raise ConversionError(
            describe(
                expected="a model that lowtide.convert converted",
                got=f"a {type(model).__name__}",
                where="restore",
                fix="pass the module that was passed to convert",
            )
        )
    for module in list(swapped_modules(model)):
        with contextlib.suppress(KeyError):
            unswap(module)
