"""What converted dense blocks, transitions and their containers run in place of their own forward.

Each falls back to its own forward at level "none", while operations are recorded (export, trace, compile), and, with
one warning, where a part has a hook or was replaced.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from lowtide import parts
from lowtide.convert.described import NotLean, describe_block, describe_stem, describe_transition
from lowtide.convert.structure import BlockPlan, ChainPlan, StemPlan
from lowtide.convert.swap import Swapped, has_kind, kind, state_of
from lowtide.functional import dense_block, densely_connected, stem, transition
from lowtide.nn.batch_norm import call_norm
from lowtide.nn.densely_connected import first_hooked
from lowtide.nn.describe import check_no_global_hooks, is_hooked, must_trace

BLOCK, TRANSITION, FEATURES, CHAIN = "dense_block", "transition", "features", "densely_connected"


def runs_plain(module: nn.Module) -> bool:
    """Whether a converted module runs its own forward now."""
    return state_of(module).level == "none" or must_trace()


def warn_plain(module: nn.Module, reason: NotLean) -> None:
    """Say once per module that it runs the plain way."""
    state = state_of(module)
    if not state.warned:
        state.warned = True
        warnings.warn(
            f"{type(module).__name__} runs in ordinary autograd, with its memory, although converted to "
            f"recompute={state.level!r}: {reason}",
            stacklevel=4,
        )


@kind(BLOCK)
class LeanBlock(Swapped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        layers = None
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            layers = describe_lean_block(self)
        if layers is None:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        out = dense_block(args[0], layers, recompute=state_of(self).level)
        plan: BlockPlan = state_of(self).plan[BLOCK]
        return out[:, plan.old_channels :] if plan.only_new else out


def describe_lean_block(block: nn.Module) -> tuple[parts.DenseLayer, ...] | None:
    """The layers of a converted block; None where it has to run its own forward."""
    if runs_plain(block):
        return None
    try:
        check_no_global_hooks()
        return describe_block(block, state_of(block).plan[BLOCK])
    except NotLean as reason:
        warn_plain(block, reason)
        return None


@kind(TRANSITION)
class LeanTransition(Swapped):
    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        described = describe_lean_transition(self)
        if described is None:
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        return transition(input, described, recompute=state_of(self).level)


def describe_lean_transition(module: nn.Module) -> parts.Transition | None:
    """A converted transition; None where it has to run its own forward."""
    if runs_plain(module):
        return None
    try:
        check_no_global_hooks()
        return describe_transition(module, state_of(module).plan[TRANSITION])
    except NotLean as reason:
        warn_plain(module, reason)
        return None


@kind(FEATURES)
class LeanFeatures(Swapped):
    """A `Sequential` that runs a block and the transition after it as one node, so that the features stay inside."""

    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self, nn.Sequential)
        if runs_plain(self):
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        x, position = _run_stem(self, input)
        children = list(self)
        while position < len(children):
            child = children[position]
            joined = None
            if position + 1 < len(children):
                joined = _run_joined(x, child, children[position + 1])
            x, position = (call_norm(child, x), position + 1) if joined is None else (joined, position + 2)
        return x


def _run_joined(x: Tensor, block: nn.Module, following: nn.Module) -> Tensor | None:
    """Block and transition in one node; None if they have to be called one by one."""
    if not (has_kind(block, BLOCK) and has_kind(following, TRANSITION)):
        return None
    level = state_of(block).level
    if is_hooked(block) or is_hooked(following) or state_of(following).level != level:
        return None
    if not isinstance(x, Tensor) or state_of(block).plan[BLOCK].only_new:
        return None
    layers = describe_lean_block(block)
    tail = None if layers is None else describe_lean_transition(following)
    return None if layers is None or tail is None else dense_block(x, layers, tail, recompute=level)


def _run_stem(features: nn.Sequential, x: Tensor) -> tuple[Tensor, int]:
    """The stem's output and the number of children that it used: 0 if they are to be called one by one."""
    plan: StemPlan | None = state_of(features).plan[FEATURES]
    if plan is None:
        return x, 0
    try:
        check_no_global_hooks()
        described = describe_stem(features, plan)
    except NotLean:  # called one by one, which is exact, and little memory is at stake
        return x, 0
    return stem(x, described, recompute=state_of(features).level), plan.count


@kind(CHAIN)
class LeanChain(Swapped):
    """A block whose layers are not those of a lean dense block: each layer is run again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        if runs_plain(self) or len(args) != 1 or not isinstance(args[0], Tensor) or kwargs:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        plan: ChainPlan = state_of(self).plan[CHAIN]
        layers = [self.get_submodule(path) for path in plan.layers]
        hooked = first_hooked(layers)
        if hooked is not None:
            warn_plain(self, NotLean(f"{plan.layers[hooked]} has a hook or its own forward"))
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if plan.returns_old:
            layers = [NewChannels(layer, new_first=plan.new_first) for layer in layers]
        out = densely_connected(
            args[0], layers, new_first=plan.new_first, recompute=state_of(self).level, growths=list(plan.growths)
        )
        if not plan.only_new:
            return out
        old = plan.old_channels
        return out[:, : out.shape[1] - old] if plan.new_first else out[:, old:]


class NewChannels(nn.Module):
    """The channels that a layer adds, where its own output holds those that it read as well."""

    def __init__(self, layer: nn.Module, *, new_first: bool) -> None:
        super().__init__()
        self.layer = layer
        self.new_first = new_first
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return out[:, : -x.shape[1]] if self.new_first else out[:, x.shape[1] :]
