"""Run a module a second time exactly as the first: random state, autocast, training flags, buffers.

The first run may draw random numbers and change buffers (running statistics). The second gives the same output from the
same input, leaves the generators and every buffer as they are, and builds the graph that the first one did not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, describe


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name; those of a data-parallel replica too, which holds them as plain attributes."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    for prefix, child in module.named_modules():
        for name, tensor in getattr(child, "_former_parameters", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


@dataclass(frozen=True)
class Autocast:
    """Autocast as it was set for a device."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def again(self) -> contextlib.AbstractContextManager[Any]:
        # without cache: a weight cast where no graph is built must not serve where one is
        return torch.autocast(self.device, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True)
class Recording:
    """What a run cannot be repeated without; tensors as places in a list of saved ones.

    `random`: place of the generator's state before the run, if the run drew numbers. `buffers`: name to place of the
    value before the run, for those that the run changed.
    """

    training: tuple[bool, ...]
    random: int | None
    buffers: tuple[tuple[str, int], ...]


def random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def record(module: nn.Module, x: Tensor, saved: list[Tensor]) -> tuple[Tensor, Recording]:
    """module(x) without graph; what the second run needs is appended to `saved`.

    Raises:
        UnsupportedError: the module changes its input in place.
    """
    state, version = random_state(x.device), x._version
    before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()}
    out = module(x)
    if x._version != version:
        raise UnsupportedError(
            describe(
                expected="layers that leave their input as it is",
                got=f"{type(module).__name__}, which changes it in place",
                where="densely connected layers",
                fix="set inplace=False on its first activation",
            )
        )
    random = None
    if not torch.equal(state, random_state(x.device)):
        random = len(saved)
        saved.append(state)
    buffers = []
    for name, (buffer, old_version, value) in before.items():
        if buffer._version != old_version and not _is_overwritten(module, name):
            buffers.append((name, len(saved)))
            saved.append(value)
    return out, Recording(tuple(m.training for m in module.modules()), random, tuple(buffers))


def _is_overwritten(module: nn.Module, name: str) -> bool:
    """Whether a buffer is the running statistic of a norm in training, whose output does not depend on it."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.modules.batchnorm._NormBase) and owner.training


def replay(
    module: nn.Module,
    x: Tensor,
    recording: Recording,
    saved: Sequence[Tensor],
    autocast: Autocast,
    *,
    graph: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """module(x), with a graph if asked for, on stand-ins for its parameters, which are returned by name.

    Touches no buffer and no generator.
    """
    stand_ins = {name: p.detach() for name, p in parameters_of(module).items()}
    for name, p in parameters_of(module).items():
        stand_ins[name].requires_grad_(graph and p.requires_grad)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    buffers.update({name: saved[place].clone() for name, place in recording.buffers})
    with (
        torch.set_grad_enabled(graph),
        autocast.again(),
        _trained_as(module, recording.training),
        _drawing(x, recording, saved),
    ):
        out = torch.func.functional_call(module, {**stand_ins, **buffers}, (x,))
    return out, stand_ins


@contextlib.contextmanager
def _trained_as(module: nn.Module, flags: Sequence[bool]) -> Iterator[None]:
    modules = list(module.modules())
    now = [m.training for m in modules]
    for m, flag in zip(modules, flags, strict=True):
        m.training = flag
    try:
        yield
    finally:
        for m, flag in zip(modules, now, strict=True):
            m.training = flag


@contextlib.contextmanager
def _drawing(x: Tensor, recording: Recording, saved: Sequence[Tensor]) -> Iterator[None]:
    if recording.random is None:
        yield
        return
    state = saved[recording.random]
    with torch.random.fork_rng(devices=[] if x.device.type == "cpu" else [x.device]):
        if x.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, x.device)
        yield


def check_closed(out: Tensor, known: Sequence[Tensor], where: str) -> None:
    """The graph of `out` must end in `known`: a parameter from elsewhere would silently miss its gradient.

    Raises:
        UnsupportedError: some other tensor would get a gradient.
    """
    if out.grad_fn is None:
        return
    allowed = {id(tensor) for tensor in known}
    seen, stack = {out.grad_fn}, [out.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in allowed:
            raise UnsupportedError(
                describe(
                    expected="layers that train only their own parameters",
                    got=f"a foreign tensor of shape {tuple(variable.shape)} that requires grad",
                    where=where,
                    fix="make it a parameter of the layer",
                )
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
