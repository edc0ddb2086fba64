"""The same network in two forms: plain, and in little memory. `lowtide verify NAME` compares them.

| built-in name | plain | in little memory |
| --- | --- | --- |
| torchvision:densenetNNN, timm:densenetNNN | as made | made with `memory_efficient=True` |
| lowtide:NAME | recompute "none" | the level asked for |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.errors import ArgumentError, describe
from lowtide.levels import Level
from lowtide.models.resolve import BUILT_IN, resolve_model

# an input that every stage of the network can halve, and that a float64 step on a laptop does not feel
_DEFAULT_INPUT = {
    "torchvision": "4x3x64x64",
    "timm": "4x3x64x64",
    "monai-1d": "4x1x256",
    "monai-2d": "4x1x64x64",
    "monai-3d": "2x1x48x48x48",
    "lowtide": "4x3x64x64",
    "lowtide-small": "4x3x32x32",
}


def resolve_pair(spec: str, recompute: Level = "pointwise") -> tuple[nn.Module, nn.Module]:
    """The plain and the lean form of the built-in network `spec`, each with weights of its own.

    Raises:
        ArgumentError: `spec` is not a built-in name, or that network has no second form.
    """
    package, _, name = spec.partition(":")
    fix = "give two models: lowtide verify REFERENCE CANDIDATE"
    if package not in BUILT_IN:
        expected = f"a built-in name ({', '.join(BUILT_IN)}:...) where one model is given"
        raise ArgumentError(describe(expected=expected, got=repr(spec), where="verify", fix=fix))
    plain, lean = resolve_model(spec)[0], None
    if package == "lowtide":
        lean = resolve_model(spec)[0]
        _module(plain).set_recompute("none")
        _module(lean).set_recompute(recompute)
    elif package in _MEMORY_EFFICIENT:
        lean = _MEMORY_EFFICIENT[package](name)
    if lean is None:
        raise ArgumentError(
            describe(expected="a network with a lean or memory-efficient form", got=repr(spec), where="verify", fix=fix)
        )
    return _module(plain), _module(lean)


def default_input(spec: str) -> str | None:
    """The input shape to verify a built-in network with; None for other models."""
    package, _, name = spec.partition(":")
    if package == "monai":
        return _DEFAULT_INPUT.get(f"monai-{name[-2:]}")
    if package == "lowtide" and name.startswith("densenet_bc"):
        return _DEFAULT_INPUT["lowtide-small"]
    return _DEFAULT_INPUT.get(package)


def _module(model: Any) -> Any:
    assert isinstance(model, nn.Module), "built-in names build modules"
    return model


def _torchvision(name: str) -> nn.Module | None:
    from torchvision import models

    takes = inspect.signature(models.get_model_builder(name)).parameters
    is_densenet = "kwargs" in takes and name.startswith("densenet")  # the option passes through **kwargs
    return models.get_model(name, weights=None, memory_efficient=True) if is_densenet else None


def _timm(name: str) -> nn.Module | None:
    import timm

    if not timm.is_model(name) or "densenet" not in name:
        return None
    return timm.create_model(name, memory_efficient=True)


_MEMORY_EFFICIENT: dict[str, Callable[[str], nn.Module | None]] = {"torchvision": _torchvision, "timm": _timm}
