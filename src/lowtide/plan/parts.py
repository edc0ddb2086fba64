"""The parts of a model that have a memory level of their own, and setting it.

| part | its levels | who else follows its level |
| --- | --- | --- |
| dense block, lowtide's or converted | none, pointwise, layer, block | the transition behind it, which is in its node |
| stem of a DenseNet for large images | none, pointwise, layer | the container that runs it |
| chain of any layers (`DenselyConnected`) | none, layer, block | |
| residual block of a sequence model | none, pointwise, layer, block | the long convolution inside |
| long convolution alone | none, pointwise, layer | |
| norms and activations of a model converted with scope "all" | none, pointwise | every module that calls them |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.convert.dense import BLOCK, CHAIN, FEATURES, TRANSITION
from lowtide.convert.model import PART
from lowtide.convert.public_sgconv import SGCONV
from lowtide.convert.swap import has_kind, is_swapped, state_of
from lowtide.levels import LEVELS, Level
from lowtide.models.features import STEM, DenseFeatures
from lowtide.nn import DenseBlock, DenselyConnected, SGConv, Transition
from lowtide.nn.residual import ResidualSGConv

_WITHOUT_BLOCK: tuple[Level, ...] = ("none", "pointwise", "layer")
_CHAIN: tuple[Level, ...] = ("none", "layer", "block")


@dataclass(frozen=True)
class Part:
    """`name` is that of its first module; all of `modules` take its level."""

    name: str
    modules: tuple[str, ...]
    levels: tuple[Level, ...]
    follows: bool = False  # it is plain only if every other part is

    def at_most(self, level: Level) -> Level:
        """The part's own level that is `level`, or the one below it that it has."""
        wanted = LEVELS.index(level)
        return LEVELS[max(LEVELS.index(own) for own in self.levels if LEVELS.index(own) <= wanted)]


def find_parts(model: nn.Module) -> list[Part]:
    """In the order of the modules; empty if nothing in the model can change its level."""
    parts: list[Part] = []
    calling = [
        name for name, module in model.named_modules() if has_kind(module, PART) and not has_kind(module, FEATURES)
    ]
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}." if outer else "") for outer in inside if outer != name):
            continue
        levels = _levels(module)
        if levels is None:
            continue
        if _is_container(module):
            # one without a stem only joins blocks and needs a level for that
            levels = _WITHOUT_BLOCK if _stem(module) else ("none", "layer")
            parts.append(Part(name, (name,), levels, follows=True))
            continue
        inside.append(name)
        before = _before(model, name)
        if _is_transition(module) and parts and parts[-1].modules[-1] == before:
            last = parts[-1]
            parts[-1] = Part(last.name, (*last.modules, name), last.levels)
        else:
            parts.append(Part(name, (name,), levels))
    if calling:
        parts.append(Part(calling[0], tuple(calling), ("none", "pointwise")))
    return parts


def _levels(module: nn.Module) -> tuple[Level, ...] | None:
    """The levels that make a difference to a module, None if it has no level of its own."""
    if is_swapped(module):
        kinds: dict[str, tuple[Level, ...]] = {
            BLOCK: LEVELS, TRANSITION: LEVELS, CHAIN: _CHAIN, SGCONV: _WITHOUT_BLOCK, FEATURES: _WITHOUT_BLOCK
        }  # fmt: skip
        return next((levels for kind, levels in kinds.items() if has_kind(module, kind)), None)
    if isinstance(module, DenseBlock | Transition | ResidualSGConv):
        return LEVELS
    if isinstance(module, DenselyConnected):
        return _CHAIN
    return _WITHOUT_BLOCK if isinstance(module, SGConv | DenseFeatures) else None


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, DenseFeatures) or has_kind(module, FEATURES)


def _is_transition(module: nn.Module) -> bool:
    return isinstance(module, Transition) or has_kind(module, TRANSITION)


def _before(model: nn.Module, name: str) -> str | None:
    """The sibling in front of a module."""
    parent, _, own = name.rpartition(".")
    names = list(model.get_submodule(parent)._modules)
    place = names.index(own) if own in names else 0
    return f"{parent}.{names[place - 1]}".lstrip(".") if place else None


def spread(parts: list[Part], levels: Mapping[str, Level]) -> dict[str, Level]:
    """Module name -> level, from part name -> level."""
    return {module: levels[part.name] for part in parts for module in part.modules}


def set_levels(model: nn.Module, levels: Mapping[str, Level]) -> None:
    """Module name -> level; the modules have to be those that `find_parts` names."""
    for name, level in levels.items():
        module: Any = model.get_submodule(name)
        if is_swapped(module):
            state_of(module).level = level
        elif hasattr(module, "set_recompute"):
            module.set_recompute(level)
        else:
            module.recompute = level


def uniform(parts: list[Part], level: Level) -> dict[str, Level]:
    """Part name -> `level`, or the nearest one below that the part has."""
    return {part.name: part.at_most(level) for part in parts}


def parameter_parts(model: nn.Module, parts: list[Part]) -> Iterator[tuple[int, str | None]]:
    """(id of a parameter, name of the innermost part that it belongs to); None outside of all parts."""
    owners = {module: part.name for part in parts for module in part.modules if not part.follows}
    for part in parts:
        if part.follows:
            prefix = f"{part.name}." if part.name else ""
            owners |= {f"{prefix}{child}": part.name for child in _stem(model.get_submodule(part.name))}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, found = name, None
        while path and found is None:
            path = path.rpartition(".")[0]
            found = owners.get(path)
        yield id(parameter), found


def _stem(container: nn.Module) -> list[str]:
    """The children of a container that are its stem."""
    if isinstance(container, DenseFeatures):
        return list(STEM) if tuple(container._modules)[:4] == STEM else []
    plan = state_of(container).plan[FEATURES]
    return [] if plan is None else list(container._modules)[: plan.count]
