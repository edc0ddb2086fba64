"""The same network in two forms: plain, and in little memory. `lowtide verify NAME` compares them.

| built-in name | plain | in little memory |
| --- | --- | --- |
| torchvision:densenetNNN, timm:densenetNNN | as made | made with `memory_efficient=True`; or converted, if asked for |
| others of torchvision, timm, MONAI | as made | converted: its dense blocks, or (without any) norms and activations |
| lowtide:NAME | recompute "none" | the level asked for |
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from lowtide.errors import ArgumentError, ConversionError, describe
from lowtide.levels import Level
from lowtide.models.built_in import PARTS, set_recompute
from lowtide.models.resolve import BUILT_IN, resolve_model

# convert(model, recompute, scope), as `lowtide.convert`
Converter = Callable[[nn.Module, Level, Any], object]

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


class Pair(NamedTuple):
    """Each with weights of its own; `form` says what the second one is."""

    plain: nn.Module
    lean: nn.Module
    form: str


def resolve_pair(spec: str, recompute: Level = "pointwise", *, convert: Converter | None = None) -> Pair:
    """The plain and the lean form of the built-in network `spec`.

    Args:
        spec: a built-in name.
        recompute: the level of the lean form.
        convert: makes the lean form where there is no other.

    Raises:
        ArgumentError: `spec` is not a built-in name, or that network has no second form.
        ConversionError: there is nothing to convert in it.
    """
    package, _, name = spec.partition(":")
    if package not in BUILT_IN:
        expected = f"a built-in name ({', '.join(BUILT_IN)}:...) where one model is given"
        fix = "give two models, or --convert to verify one against its converted form"
        raise ArgumentError(describe(expected=expected, got=repr(spec), where="verify", fix=fix))
    plain = _module(resolve_model(spec)[0])
    if package == "lowtide":
        lean = _module(resolve_model(spec)[0])
        set_recompute(plain, "none")
        set_recompute(lean, recompute)
        return Pair(plain, lean, f"recompute={recompute}")
    lean = _MEMORY_EFFICIENT[package](name) if package in _MEMORY_EFFICIENT else None
    if lean is not None:
        return Pair(plain, lean, "memory_efficient=True")
    if convert is None:
        fix = "give two models: lowtide verify REFERENCE CANDIDATE"
        expected = "a network with a lean or memory-efficient form"
        raise ArgumentError(describe(expected=expected, got=repr(spec), where="verify", fix=fix))
    return converted_pair(plain, recompute, convert)


def converted_pair(plain: nn.Module, recompute: Level, convert: Converter) -> Pair:
    """A network and a converted copy of it: its dense blocks, or, if it has none, everything.

    Raises:
        ConversionError: there is nothing to convert in it.
    """
    lean = copy.deepcopy(plain)
    try:
        convert(lean, recompute, "blocks")
    except ConversionError:
        convert(lean, recompute, "all")
        return Pair(plain, lean, f"converted, scope=all, recompute={recompute}")
    return Pair(plain, lean, f"converted, recompute={recompute}")


def list_pairs() -> list[dict[str, str]]:
    """What one built-in name alone can be verified as: name, plain, lean, input."""
    lean = "the level of --recompute"
    efficient = "made with memory_efficient=True; with --convert: converted"
    rows = [
        ("torchvision:densenet121, 161, 169, 201", "as made", efficient, _DEFAULT_INPUT["torchvision"]),
        ("torchvision:NAME", "as made", "converted", _DEFAULT_INPUT["torchvision"]),
        ("timm:densenet121, 161, 169, 201, 264d", "as made", efficient, _DEFAULT_INPUT["timm"]),
        ("timm:NAME", "as made", "converted", _DEFAULT_INPUT["timm"]),
        *(
            (f"monai:densenet121{dims}, 169, 201, 264", "as made", "converted", _DEFAULT_INPUT[f"monai{dims}"])
            for dims in ("-1d", "-2d", "-3d")
        ),
        ("lowtide:densenet121, 161, 169, 201, 264", 'recompute="none"', lean, _DEFAULT_INPUT["lowtide"]),
        ("lowtide:densenet_bc-DEPTH-GROWTH", 'recompute="none"', lean, _DEFAULT_INPUT["lowtide-small"]),
        *((f"lowtide:{name}", 'recompute="none"', lean, part.input) for name, part in PARTS.items()),
    ]
    return [dict(zip(("name", "plain", "lean", "input"), row, strict=True)) for row in rows]


def default_input(spec: str) -> str | None:
    """The input shape to verify a built-in network with; None for other models."""
    package, _, name = spec.partition(":")
    if package == "monai":
        return _DEFAULT_INPUT.get(f"monai-{name[-2:]}", _DEFAULT_INPUT["monai-2d"])
    if package == "lowtide":
        if name in PARTS:
            return PARTS[name].input
        return _DEFAULT_INPUT["lowtide-small" if name.startswith("densenet_bc") else "lowtide"]
    return _DEFAULT_INPUT.get(package)


def _module(model: Any) -> nn.Module:
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
