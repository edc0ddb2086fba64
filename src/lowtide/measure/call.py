"""One repeat: the function, then a backward from its result with fixed random weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.errors import ArgumentError, UnsupportedError, describe

SEED = 20_240_229
MakeGradients = Callable[[], Sequence[Tensor]]


class ResultGradient(torch.autograd.Function):
    """Starts a backward from tensors of any shape: their gradients are fixed random numbers.

    A sum of squares, or a projection, would have to keep the result; this keeps nothing. The gradients are made when
    backward starts and belong to the engine, which frees each after its use: the memory is that of a training step
    whose loss follows.
    """

    @staticmethod
    def forward(ctx: Any, gradients: MakeGradients, *results: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device=results[0].device)  # no bytes: the meter must not be in its own figures

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients())


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Fixed normal numbers of each tensor's shape, dtype and device; the global generators are not touched."""
    generators = {t.device: torch.Generator(t.device).manual_seed(SEED) for t in tensors}
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generators[t.device]) for t in tensors]


class Call:
    """`fn(*args)` and the backward from what it returns."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], device: torch.device) -> None:
        self.fn, self.device = fn, device
        self.args = tree_map(lambda a: _moved(a, device) if isinstance(a, Tensor) else a, tuple(args))
        self._gradients: list[Tensor] | None = None

    @property
    def argument_tensors(self) -> list[Tensor]:
        return tensors_in(self.args)

    def forward(self) -> Any:
        return self.fn(*self.args)

    def backward(self, result: Any, *, reuse_gradients: bool = False) -> None:
        """Backward from every tensor in `result` that has a graph; nothing if there is none.

        With `reuse_gradients` the random numbers are drawn once and kept, so that they cost a timed repeat nothing.
        """
        outputs = differentiable(result)
        if not outputs:
            return
        if not reuse_gradients:
            gradients = partial(random_like, outputs)
        else:
            if self._gradients is None or [g.shape for g in self._gradients] != [o.shape for o in outputs]:
                self._gradients = random_like(outputs)
            gradients = partial(list, self._gradients)
        with torch.enable_grad():
            start = ResultGradient.apply(gradients, *outputs)
        assert isinstance(start, Tensor), "a single tensor"
        start.backward(start.detach())

    def run(self, *, reuse_gradients: bool = False) -> None:
        self.backward(self.forward(), reuse_gradients=reuse_gradients)


def surroundings(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """What a call can reach, as far as can be seen before: fn, a bound method's owner, arguments, closure, globals."""
    while isinstance(fn, partial):
        args, fn = (*args, *fn.args, *fn.keywords.values()), fn.func
    found = [fn, getattr(fn, "__self__", None), *tree_leaves(tuple(args))]
    # builtins and callable objects have no closure; an empty cell is a ValueError
    with contextlib.suppress(TypeError, ValueError):
        variables = inspect.getclosurevars(fn)
        found += tree_leaves([*variables.nonlocals.values(), *variables.globals.values()])
    return found


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    return moved.requires_grad_(tensor.requires_grad)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def differentiable(result: Any) -> list[Tensor]:
    """The tensors in a result from which a backward can start, each once."""
    found = {id(t): t for t in tensors_in(result) if t.grad_fn is not None}
    return list(found.values())


def choose_device(fn: Callable[..., Any], args: Sequence[Any], device: str | torch.device | None) -> torch.device:
    """The device whose memory is read: the one asked for, else that of the first argument or parameter, else the CPU.

    Raises:
        ArgumentError: CUDA without a CUDA device; a module whose parameters are elsewhere.
        UnsupportedError: neither the CPU nor CUDA.
    """
    where = "measure(device=...)"
    owners = [owner for owner in (fn, getattr(fn, "__self__", None)) if isinstance(owner, nn.Module)]
    state = [parameter for owner in owners for parameter in owner.parameters()]
    if device is None:
        found = [*tensors_in(tuple(args)), *state]
        chosen = found[0].device if found else torch.device("cpu")
    else:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise ArgumentError(
                describe(expected="a device such as 'cpu' or 'cuda:0'", got=repr(device), where=where)
            ) from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            describe(expected="a CUDA device here", got=repr(str(chosen)), where=where, fix="use device='cpu'")
        )
    if chosen.type not in ("cpu", "cuda"):
        raise UnsupportedError(describe(expected="cpu or cuda", got=repr(str(chosen)), where=where))
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    elsewhere = next((p.device for p in state if p.device.type != chosen.type), None)
    if elsewhere is not None:
        fix = f"move the module first: module.to('{chosen}')"
        raise ArgumentError(
            describe(expected=f"parameters on {chosen}", got=f"parameters on {elsewhere}", where=where, fix=fix)
        )
    return chosen
