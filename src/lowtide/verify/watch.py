"""Hooks that record each call of some modules: what went in, what came out, and the gradients of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowtide.verify.trees import is_inexact, leaves, map_tensors

Tensors = dict[str, Tensor]


@dataclass
class CallView:
    """One call of one module. Gradients of inputs are this call's own share, whoever else reads the same tensor."""

    module: str
    started: int
    finished: int = -1
    inputs: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    output_requires_grad: dict[str, bool] = field(default_factory=dict)
    input_grads: Tensors = field(default_factory=dict)
    output_grads: Tensors = field(default_factory=dict)
    inputs_changed: bool = False
    generator_before: int = 0  # a digest of torch's generator
    generator_after: int = 0


class CallOrder:
    """The names of modules in the order in which their first calls finish."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names: dict[str, None] = {}
        self._handles = [m.register_forward_hook(self._after(name)) for name, m in modules.items()]

    def _after(self, name: str):
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self.names.setdefault(name)

        return hook

    def forward_done(self) -> None:
        """Nothing to do between forward and backward."""

    def backward_done(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


class Watch:
    """Hooks on `modules` for one run; `calls` by module name, those made during the backward (a recompute) left out."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.calls: dict[str, list[CallView]] = {name: [] for name in modules}
        self._clock = 0
        self._forward = True
        self._given: dict[str, list[Tensors]] = {name: [] for name in modules}
        self._handles = []
        for name, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))

    def in_order(self) -> list[CallView]:
        """All calls that finished, in the order in which they did: children before their parents."""
        done = [call for calls in self.calls.values() for call in calls if call.finished >= 0]
        return sorted(done, key=lambda call: call.finished)

    def _before(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict):
            if not self._forward:
                return None
            call = CallView(name, self._tick(), generator_before=_generator_digest())
            self.calls[name].append(call)
            # an alias of each input, so that its gradient is this module's contribution alone
            args, kwargs = map_tensors((args, kwargs), _alias)  # type: ignore[misc]
            given: Tensors = {}
            for path, leaf in leaves((args, kwargs), "input").items():
                if isinstance(leaf, Tensor):
                    call.inputs[path] = leaf.detach().clone()
                    given[path] = leaf
                    _keep_grad(leaf, call.input_grads, path)
            self._given[name].append(given)
            return args, kwargs

        return hook

    def _after(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            if not self._forward:
                return
            call = next(c for c in reversed(self.calls[name]) if c.finished < 0)
            call.finished = self._tick()
            call.generator_after = _generator_digest()
            given = self._given[name].pop()
            call.inputs_changed = any(not torch.equal(given[path].detach(), call.inputs[path]) for path in given)
            for path, leaf in leaves(output, "output").items():
                if is_inexact(leaf):
                    assert isinstance(leaf, Tensor)
                    call.outputs[path] = leaf.detach().clone()
                    call.output_requires_grad[path] = leaf.requires_grad
                    _keep_grad(leaf, call.output_grads, path)

        return hook

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def forward_done(self) -> None:
        """From here on a call is a recompute, and is not recorded."""
        self._forward = False

    def backward_done(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _generator_digest() -> int:
    return hash(torch.get_rng_state().numpy().tobytes())


def _alias(t: Tensor) -> Tensor:
    return t.view_as(t) if t.requires_grad and not t.is_sparse else t


def _keep_grad(t: Tensor, store: Tensors, path: str) -> None:
    if t.requires_grad:
        t.register_hook(
            lambda grad: store.__setitem__(path, store[path] + grad if path in store else grad.detach().clone())
        )
