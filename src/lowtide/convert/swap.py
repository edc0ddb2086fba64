"""A module keeps its identity, parameters, keys and hooks, and gets another forward: its class is exchanged.

The new class derives from the old one with mixins in front (`isinstance` still holds, and its name stays), so that a
copy, a pickle or a data-parallel replica runs its own modules, and `restore` is the assignment of the old class. All
that a mixin knows about its module stands in one entry of the instance's dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lowtide.levels import Level

STATE = "_lowtide"


@dataclass
class State:
    """What a converted module knows. `plan` belongs to the mixins, by their names; `warned`: that it ran plain."""

    level: Level
    plan: dict[str, Any] = field(default_factory=dict)
    warned: bool = False


class Swapped:
    """First base of every exchanged class; mixins derive from it, and name themselves in `KINDS`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kinds, base = _CLASSES[type(self)]
        function, arguments, *rest = super().__reduce_ex__(protocol)  # pyright: ignore[reportGeneralTypeIssues]
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        return (_rebuild, (kinds, function, arguments), *rest)


KINDS: dict[str, type[Swapped]] = {}
_CLASSES: dict[type, tuple[tuple[str, ...], type[nn.Module]]] = {}
_MADE: dict[tuple[tuple[str, ...], type[nn.Module]], type[nn.Module]] = {}


def kind(name: str) -> Callable[[type[Swapped]], type[Swapped]]:
    """Class decorator: `name` stands for the mixin in pickles."""

    def register(mixin: type[Swapped]) -> type[Swapped]:
        KINDS[name] = mixin
        return mixin

    return register


def _class_of(kinds: tuple[str, ...], base: type[nn.Module]) -> type[nn.Module]:
    made = _MADE.get((kinds, base))
    if made is None:
        mixins = tuple(KINDS[name] for name in kinds)
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        made = type(base.__name__, (*mixins, base), namespace)
        _MADE[kinds, base] = made
        _CLASSES[made] = (kinds, base)
    return made


def _rebuild(kinds: tuple[str, ...], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = function(*arguments)
    module.__class__ = _class_of(kinds, type(module))
    return module


def swap(module: nn.Module, name: str, plan: Any, level: Level) -> None:
    """Put the mixin `name` in front of what the module runs."""
    kinds, base = _CLASSES.get(type(module), ((), type(module)))
    state: State = module.__dict__.setdefault(STATE, State(level))
    state.plan[name] = plan
    module.__class__ = _class_of((name, *kinds), base)


def unswap(module: nn.Module) -> None:
    """Undo every `swap` of this module."""
    _, module.__class__ = _CLASSES[type(module)]
    del module.__dict__[STATE]


def is_swapped(module: nn.Module) -> bool:
    return type(module) in _CLASSES


def has_kind(module: nn.Module, name: str) -> bool:
    return name in _CLASSES.get(type(module), ((), None))[0]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had, or has."""
    return _CLASSES[type(module)][1] if is_swapped(module) else type(module)


def state_of(module: nn.Module) -> State:
    return module.__dict__[STATE]


def swapped_modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if is_swapped(module))
