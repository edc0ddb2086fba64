"""Which modules of a model to convert, and why not the others. Nothing is changed here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.convert import dense
from lowtide.convert.described import SUPPORTED, NotLean, describe_block, describe_stem, describe_transition
from lowtide.convert.obstacles import Obstacles
from lowtide.convert.probe import ProbeError, compare, probe_copy, sample_map, undisturbed
from lowtide.convert.public_sgconv import SGCONV, find_sgconv, looks_like_sgconv
from lowtide.convert.report import Skipped
from lowtide.convert.structure import (
    BlockPlan,
    ChainPlan,
    StemPlan,
    find_block,
    find_chain,
    find_stem,
    find_transition,
    is_plain_norm,
    is_unsupported_norm,
    saves_its_input,
)
from lowtide.convert.swap import swap
from lowtide.levels import Level
from lowtide.nn import DenseBlock, DenselyConnected, SGConv, Transition

_STEM_SIZES = {1: (19,), 2: (17, 19), 3: (13, 11, 12)}


@dataclass(frozen=True)
class Action:
    """Put the mixin `kind` in front of the module at `path`; `label` is for the report."""

    path: str
    kind: str
    plan: Any
    label: str


class Finder:
    """Walks a model; `actions` and `skipped` in the order of the modules."""

    def __init__(self, model: nn.Module, level: Level, *, everything: bool) -> None:
        self.model = model
        self.level: Level = "layer" if level == "none" else level
        self.everything = everything
        self.actions: list[Action] = []
        self.skipped: list[Skipped] = []
        self._obstacles = Obstacles(model)

    def run(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._blocks()
            self._containers()
        if self.everything:
            self._norms_and_activations()

    def _outside(self, paths: list[str]) -> Iterator[tuple[str, nn.Module]]:
        """Modules that are not inside one of `paths`."""
        for path, module in self.model.named_modules():
            if not any(path == root or path.startswith(f"{root}." if root else "") for root in paths):
                yield path, module

    def _blocks(self) -> None:
        done: list[str] = []
        for path, module in self.model.named_modules():
            if any(path.startswith(f"{root}." if root else "") for root in done if root != path):
                continue
            if isinstance(module, DenseBlock | DenselyConnected | Transition | SGConv):
                self.skipped.append(Skipped(path, "it is lean already: set_recompute changes its level"))
                done.append(path)
                continue
            if looks_like_sgconv(module):
                self._sgconv(path, module)
                done.append(path)
                continue
            plan = find_block(module)
            chain = find_chain(module) if plan is None or self.everything else None
            settled = (plan is not None or chain is not None) and self._block(path, module, plan, chain)
            if not settled and find_transition(module) is not None:
                settled = self._transition(path, module)
            if settled:
                done.append(path)

    def _block(self, path: str, module: nn.Module, plan: BlockPlan | None, chain: ChainPlan | None) -> bool:
        """Whether the module is settled: nothing inside it is to be looked at."""
        obstacle = reason = self._obstacles.of(module, path)
        if plan is not None and reason is None:
            try:
                with undisturbed(module):
                    checked = check_block(module, plan, self.level)
                self.actions.append(Action(path, dense.BLOCK, checked, f"dense block of {len(plan.layers)} layers"))
                return True
            except (ProbeError, NotLean) as error:
                reason = f"{error}; {SUPPORTED}" if isinstance(error, NotLean) else str(error)
        if chain is not None and self.everything and obstacle is None:
            try:
                with undisturbed(module):
                    found = check_chain(module, chain, self.level)
            except ProbeError as error:
                reason = reason or str(error)
            else:
                label = f"densely connected chain of {len(chain.layers)} layers"
                self.actions.append(Action(path, dense.CHAIN, found, label))
                return True
        # one layer alone has the parts of many another thing, and so has a chain of unknown layers
        if plan is not None and len(plan.layers) > 1:
            if not self.everything and obstacle is None and chain_would_do(module, self.level):
                reason = f'{reason}; scope="all" converts it layer by layer'
            self.skipped.append(Skipped(path, reason or "unknown"))
        return False

    def _sgconv(self, path: str, module: nn.Module) -> None:
        reason = self._obstacles.of(module, path)
        if reason is None:
            try:
                with undisturbed(module):
                    plan = find_sgconv(module, self.level)
            except (ProbeError, NotLean) as error:
                reason = str(error)
            else:
                kernel = plan.form.kernel
                label = f"long convolution, {kernel.n_scales} scales ({kernel.combine}), {kernel.taps} taps"
                self.actions.append(Action(path, SGCONV, plan, label))
                return
        self.skipped.append(Skipped(path, reason))

    def _transition(self, path: str, module: nn.Module) -> bool:
        plan = find_transition(module)
        assert plan is not None
        reason = self._obstacles.of(module, path)
        if reason is None:
            try:
                describe_transition(module, plan)
                twin = probe_copy(module)
                x = sample_map(twin, _channels(twin, plan.step.conv))
                compare(twin, lambda copied: swap(copied, dense.TRANSITION, plan, self.level), x, among_others=False)
            except (ProbeError, NotLean) as error:
                reason = str(error)
            else:
                self.actions.append(Action(path, dense.TRANSITION, plan, "transition"))
                return True
        self.skipped.append(Skipped(path, reason))
        return False

    def _containers(self) -> None:
        """`Sequential`s that hold a converted block or transition can join them, and run the stem."""
        converted = {action.path for action in self.actions}
        for path, module in self.model.named_modules():
            if type(module).forward is not nn.Sequential.forward or "forward" in module.__dict__:
                continue
            inside = f"{path}." if path else ""
            if not any(f"{inside}{name}" in converted for name in module._modules):
                continue
            stem = find_stem(module)
            if stem is not None and not self._stem_is_lean(module, stem):
                stem = None
            label = "stem and joined blocks" if stem else "joined blocks"
            self.actions.append(Action(path, dense.FEATURES, stem, label))

    def _stem_is_lean(self, module: nn.Module, plan: StemPlan) -> bool:
        try:
            describe_stem(module, plan)
            children = list(module.named_children())[: plan.count]
            first = probe_copy(nn.Sequential(OrderedDict(children)))
            conv: Any = first.get_submodule(plan.step.conv)
            x = sample_map(first, conv.in_channels, _STEM_SIZES[len(conv.kernel_size)])
            compare(first, lambda copied: swap(copied, dense.FEATURES, plan, self.level), x, among_others=False)
        except (ProbeError, NotLean):
            return False
        return True

    def _norms_and_activations(self) -> None:
        done = [action.path for action in self.actions if action.kind != dense.FEATURES]
        for path, module in self._outside(done):
            if is_plain_norm(module):
                self.actions.append(Action(path, "", None, f"{type(module).__name__} whose input alone is kept"))
            elif is_unsupported_norm(module):
                kinds = "batch norm of one process, instance norm, group norm"
                reason = f"{type(module).__name__} is no norm with a lean form ({kinds})"
                self.skipped.append(Skipped(path, reason))
            elif saves_its_input(module):
                label = f"{type(module).__name__} whose output is made again"
                self.actions.append(Action(path, "", None, label))


def _channels(module: nn.Module, conv: str) -> int:
    found: Any = module.get_submodule(conv)
    return found.in_channels


def check_block(module: nn.Module, plan: BlockPlan, level: Level) -> BlockPlan:
    """The plan, completed by what a trial run shows.

    Raises:
        ProbeError, NotLean: it is no lean dense block.
    """
    describe_block(module, plan)
    twin = probe_copy(module)
    x = sample_map(twin, plan.old_channels)
    total = plan.old_channels + sum(_growths(twin, plan))
    channels = _output_channels(twin, x)
    if channels not in (total, total - plan.old_channels):
        raise ProbeError(f"it returns {channels} channels; a dense block returns {total}, its input among them")
    plan = replace(plan, only_new=channels != total)
    compare(twin, lambda copied: swap(copied, dense.BLOCK, plan, level), x, among_others=False)
    return plan


def _growths(module: nn.Module, plan: BlockPlan) -> list[int]:
    lasts: list[Any] = [module.get_submodule(f"{layer.path}.{layer.steps[-1].conv}") for layer in plan.layers]
    return [last.out_channels for last in lasts]


def _output_channels(module: nn.Module, x: Tensor) -> int:
    out = _trial(lambda: module(x))
    if not isinstance(out, Tensor) or out.dim() != x.dim():
        raise ProbeError("it does not return one map")
    return out.shape[1]


def _trial(call: Callable[[], Any]) -> Any:
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        raise ProbeError(f"a trial run failed: {error}") from None


def check_chain(module: nn.Module, plan: ChainPlan, level: Level) -> ChainPlan:
    """The plan of a chain of any layers, completed by what trial runs show.

    Raises:
        ProbeError: the block is not such a chain.
    """
    twin = probe_copy(module)
    x = sample_map(twin, plan.old_channels)
    added = []
    for path, count in zip(plan.layers, plan.channels, strict=True):
        layer = twin.get_submodule(path)
        added.append(_output_channels(layer, sample_map(twin, count)))
    expected = [b - a for a, b in zip(plan.channels, plan.channels[1:], strict=False)]
    returns_old = [channels - count for channels, count in zip(added, plan.channels, strict=True)]
    if added[:-1] == expected:
        plan = replace(plan, growths=tuple(added))
    elif returns_old[:-1] == expected and returns_old[-1] > 0:
        plan = replace(plan, growths=tuple(returns_old), returns_old=True)
    else:
        raise ProbeError("its layers do not add the channels that the next ones read")
    total = plan.old_channels + sum(plan.growths)
    channels = _output_channels(twin, x)
    if channels not in (total, total - plan.old_channels):
        raise ProbeError(f"it returns {channels} channels; a dense block returns {total}, its input among them")
    plan = replace(plan, only_new=channels != total)
    failure = ProbeError("")
    for new_first in (False, True):
        candidate = replace(plan, new_first=new_first)
        try:
            compare(twin, lambda copied, p=candidate: swap(copied, dense.CHAIN, p, level), x)
        except ProbeError as error:
            failure = error
        else:
            return candidate
    raise failure


def chain_would_do(module: nn.Module, level: Level) -> bool:
    """Whether scope "all" would convert the block."""
    plan = find_chain(module)
    try:
        with undisturbed(module):
            return plan is not None and check_chain(module, plan, level) is not None
    except ProbeError:
        return False
