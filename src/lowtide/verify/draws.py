"""Random numbers: the same for both modules, given back to the caller, and replayed in another precision."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.verify.trees import leaves

# operators whose result is the draw itself, whatever tensor they were given: the recorded result can stand in for it
_PURE_DRAWS = frozenset(
    {"bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "poisson"}
    | {"rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm", "uniform"}
)


class NotReplayableError(Exception):
    """A draw of one run has no counterpart in the other, so that the two runs cannot be compared."""


def generator_states(device: torch.device) -> dict[str, object]:
    """The state of every generator that a module may draw from, by name."""
    states: dict[str, object] = {"torch generator": torch.get_rng_state()}
    if device.type == "cuda":
        states["torch.cuda generator"] = torch.cuda.get_rng_state(device)
    states["random generator"] = random.getstate()
    states["numpy generator"] = np.random.get_state(legacy=False)  # noqa: NPY002 - modules draw from the global one
    return states


def same_state(a: object, b: object) -> bool:
    """Whether two generator states are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a == b


def seed_all(seed: int) -> None:
    """Seed every generator of `generator_states`."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


@contextlib.contextmanager
def caller_untouched(device: torch.device) -> Iterator[None]:
    """Give back, on exit, the caller's generators; inside, gradients are on and autocast is off."""
    states = generator_states(device)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_rng_state(states["torch generator"])  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["torch.cuda generator"], device)  # type: ignore[arg-type]
        random.setstate(states["random generator"])  # type: ignore[arg-type]
        np.random.set_state(states["numpy generator"])  # type: ignore[arg-type]  # noqa: NPY002


@dataclass(frozen=True)
class Draw:
    """One random operator and what it returned."""

    operator: str
    values: tuple[Tensor, ...]


def _is_draw(func: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class DrawRecorder(TorchDispatchMode):
    """Keeps a copy of every random tensor drawn while it is active, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_draw(func):
            return func(*args, **(kwargs or {}))
        name, before = _name(func), torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        # scaled_dot_product_attention carries the tag even where its dropout is off
        if _is_pure(name) or _tensors(out)[0].is_cuda or not torch.equal(before, torch.get_rng_state()):
            self.draws.append(Draw(name, tuple(t.detach().clone() for t in _tensors(out))))
        return out


class DrawReplayer(TorchDispatchMode):
    """Gives back the recorded random tensors, in order, cast to the dtype that is asked for now.

    Raises (inside the run): `NotReplayableError` when another operator or another shape is asked for.
    """

    def __init__(self, draws: list[Draw]) -> None:
        super().__init__()
        self._left = list(reversed(draws))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_draw(func):
            return func(*args, **(kwargs or {}))
        name = _name(func)
        out = func(*args, **(kwargs or {}))
        if not _is_pure(name) and name != "native_dropout" and not (self._left and self._left[-1].operator == name):
            return out  # tagged as random, yet nothing was drawn when it was recorded
        if not self._left:
            raise NotReplayableError(f"{name} was not called in the recorded run")
        draw = self._left.pop()
        fresh = _tensors(out)
        if draw.operator != name or [t.shape for t in fresh] != [t.shape for t in draw.values]:
            raise NotReplayableError(f"{name} was asked for where {draw.operator} was recorded")
        if name == "native_dropout":  # (input, p, train) -> (output, mask): the output depends on the input
            x, p, mask = args[0], args[1], draw.values[1]
            fresh[0].copy_(x * mask / (1 - p))
            fresh[1].copy_(mask)
        elif _is_pure(name):
            for target, value in zip(fresh, draw.values, strict=True):
                target.copy_(value)
        else:
            raise NotReplayableError(f"{name} mixes its draw with its input")
        return out


def _is_pure(name: str) -> bool:
    return name.removesuffix("_") in _PURE_DRAWS


def _name(func: torch._ops.OpOverload) -> str:
    return func.overloadpacket.__name__


def _tensors(out: object) -> list[Tensor]:
    return [t for t in leaves(out, "").values() if isinstance(t, Tensor)]
