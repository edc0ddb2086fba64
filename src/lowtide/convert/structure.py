"""Which modules are dense layers, blocks and transitions, seen by their parts and channel counts, not by their names.

A layer is norm - act - conv (1x1) - norm - act - conv (3x3), or norm - act - conv (3x3); a block is a list of layers
each of which reads k channels more than the one before. What is found here is only a candidate: whether the forward
that somebody wrote around these parts is a dense block is decided by running it (probe.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.nn.batch_norm import SYNC_BATCH_NORMS

NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DROPOUTS = (nn.modules.dropout._DropoutNd,)
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.GELU, nn.Mish,
    nn.Hardswish, nn.Softplus, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def norm_has_activation(module: nn.Module) -> bool:
    """A batch norm that holds its activation as a child `act`."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(getattr(module, "act", None), nn.Module)


def leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute something, in order; a norm or convolution is one even if it has children."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Identity):
            continue
        if isinstance(child, (*NORMS, *CONVOLUTIONS)) or not child._modules:
            yield path, child
        else:
            yield from leaves(child, f"{path}.")


def _letter(module: nn.Module) -> str:
    if norm_has_activation(module):
        return "NA"
    for letter, types in (
        ("N", NORMS), ("A", ACTIVATIONS), ("C", CONVOLUTIONS), ("D", DROPOUTS), ("P", AVERAGE_POOLS), ("M", MAX_POOLS)
    ):  # fmt: skip
        if isinstance(module, types):
            return letter
    return "?"


@dataclass(frozen=True)
class Step:
    """norm, activation and convolution by the names of their modules; `act` is None where the norm's module or a
    function call does it."""

    norm: str
    act: str | None
    conv: str


@dataclass(frozen=True)
class LayerPlan:
    """A dense layer: its path in the block, the paths of its parts in it, and all of its leaves."""

    path: str
    steps: tuple[Step, ...]
    dropout: str | None
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class BlockPlan:
    """`old_channels`: c0. `only_new`: the block returns what its layers added, without its input."""

    layers: tuple[LayerPlan, ...]
    old_channels: int
    only_new: bool = False


@dataclass(frozen=True)
class TransitionPlan:
    step: Step
    pool: str
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class StemPlan:
    """The first children of a `Sequential`, by their names."""

    step: Step  # norm and act follow the convolution here
    pool: str
    count: int


@dataclass(frozen=True)
class ChainPlan:
    """A block of any layers: their paths and the channels that each one reads.

    `returns_old`: a layer returns what it read beside what it adds. `new_first`: on which side. `only_new`: the block
    returns what its layers added, without its input.
    """

    layers: tuple[str, ...]
    channels: tuple[int, ...]
    growths: tuple[int, ...] = ()
    new_first: bool = False
    returns_old: bool = False
    only_new: bool = False

    @property
    def old_channels(self) -> int:
        return self.channels[0]


def kernel(module: Any) -> int:
    """The size of a convolution's kernel if it is the same along each axis, else 0."""
    sizes = set(module.kernel_size)
    return sizes.pop() if len(sizes) == 1 else 0


def _steps(found: list[tuple[str, nn.Module]]) -> tuple[list[Step], list[tuple[str, nn.Module]]] | None:
    """The norm-act-conv runs at the start, and what follows them."""
    steps: list[Step] = []
    while found and "N" in _letter(found[0][1]):
        norm, *rest = found
        act = None
        if rest and _letter(rest[0][1]) == "A" and _letter(norm[1]) == "N":
            act, *rest = rest
        if not rest or _letter(rest[0][1]) != "C":
            return (steps, found) if steps else None
        conv, *found = rest
        steps.append(Step(norm[0], None if act is None else act[0], conv[0]))
    return (steps, found) if steps else None


def find_layer(module: nn.Module, path: str) -> LayerPlan | None:
    """The plan of a dense layer, if the parts of `module` are those of one."""
    found = list(leaves(module))
    split = _steps(found)
    if split is None:
        return None
    steps, rest = split
    sizes = [kernel(module.get_submodule(step.conv)) for step in steps]
    if sizes not in ([1, 3], [3]):
        return None
    dropout = None
    if rest and _letter(rest[0][1]) == "D":
        dropout, rest = rest[0][0], rest[1:]
    if rest:
        return None
    return LayerPlan(path, tuple(steps), dropout, tuple(name for name, _ in found))


def find_block(module: nn.Module) -> BlockPlan | None:
    """The plan of a dense block, if the children of `module` (or of its only child, a list) chain like one."""
    prefix, children = children_of_block(module)
    if not children:
        return None
    plans: list[LayerPlan] = []
    channels = old = 0
    for name, child in children:
        plan = find_layer(child, f"{prefix}{name}")
        if plan is None:
            return None
        first, last = (child.get_submodule(plan.steps[i].conv) for i in (0, -1))
        assert isinstance(first, CONVOLUTIONS)
        assert isinstance(last, CONVOLUTIONS)
        if not plans:
            channels = old = first.in_channels
        if first.in_channels != channels:
            return None
        plans.append(plan)
        channels += last.out_channels
    return BlockPlan(tuple(plans), old)


def find_chain(module: nn.Module) -> ChainPlan | None:
    """The layers of a block that are no lean dense layers, each of which reads more channels than the one before."""
    prefix, children = children_of_block(module)
    channels = [_channels_read(child) for _, child in children]
    if len(channels) < 2 or any(count is None for count in channels):
        return None
    counts = tuple(count for count in channels if count is not None)
    growths = [after - before for before, after in itertools.pairwise(counts)]
    if any(not _adds(child, growth) for (_, child), growth in zip(children, growths, strict=False)):
        return None
    return ChainPlan(tuple(f"{prefix}{name}" for name, _ in children), counts)


def _adds(module: nn.Module, growth: int) -> bool:
    """Whether some convolution inside makes `growth` channels."""
    return growth > 0 and any(isinstance(m, CONVOLUTIONS) and m.out_channels == growth for m in module.modules())


def _channels_read(module: nn.Module) -> int | None:
    """The channels of a map that the first part of `module` can read."""
    first: Any = next((leaf for _, leaf in leaves(module)), module)
    for name in ("num_features", "num_channels", "in_channels"):
        if isinstance(first, (*NORMS, *CONVOLUTIONS)) and isinstance(getattr(first, name, None), int):
            return getattr(first, name)
    return None


def children_of_block(module: nn.Module) -> tuple[str, list[tuple[str, nn.Module]]]:
    """The candidates for layers, and the path that leads to them."""
    children = list(module.named_children())
    if len(children) == 1 and isinstance(children[0][1], nn.ModuleList):
        return f"{children[0][0]}.", list(children[0][1].named_children())
    return "", children


def find_transition(module: nn.Module) -> TransitionPlan | None:
    """The plan of norm - relu - conv (1x1) - average pool, if these are the children of a `Sequential`."""
    if not isinstance(module, nn.Sequential):
        return None
    found = list(leaves(module))
    split = _steps(found)
    if split is None or len(split[0]) != 1 or [_letter(m) for _, m in split[1]] != ["P"]:
        return None
    (step,), ((pool, _),) = split
    if kernel(module.get_submodule(step.conv)) != 1:
        return None
    return TransitionPlan(step, pool, tuple(name for name, _ in found))


def find_stem(module: nn.Module) -> StemPlan | None:
    """conv (7x7) - norm - relu - max pool at the start of a `Sequential`."""
    children = [(name, child) for name, child in module.named_children() if not isinstance(child, nn.Identity)]
    letters = ""
    for count, (_, child) in enumerate(children[:4], start=1):
        letters += _letter(child)
        if letters == "CNAM":
            conv, norm, *act, pool = (name for name, _ in children[:count])
            if list(module._modules)[:count] != [conv, norm, *act, pool]:
                return None
            return StemPlan(Step(norm, act[0] if act else None, conv), pool, count)
    return None


def is_plain_norm(module: nn.Module) -> bool:
    """A norm that scope "all" covers: batch norm of one process, instance norm, group norm."""
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm) and not isinstance(
        module, SYNC_BATCH_NORMS
    )


def is_unsupported_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) and not is_plain_norm(module)


def saves_its_input(module: nn.Module) -> bool:
    """An activation for whose derivative autograd keeps the input beside the output that is kept anyway."""
    kinds = (nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Mish, nn.Hardswish)
    return isinstance(module, kinds) and not getattr(module, "inplace", False)
