"""From the modules that a plan names to `lowtide.parts`, at each call: a hooked or replaced one ends the lean way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide import parts
from lowtide.convert.structure import (
    AVERAGE_POOLS,
    MAX_POOLS,
    BlockPlan,
    LayerPlan,
    StemPlan,
    Step,
    TransitionPlan,
    leaves,
    norm_has_activation,
)
from lowtide.nn.batch_norm import as_parts
from lowtide.nn.describe import NotLean, check_relu, check_unhooked, describe_convolution, describe_norm

SUPPORTED = "lean blocks take batch norm, ReLU, square convolutions without groups, and dropout"
_DROP_RATES = ("drop_rate", "droprate", "dropRate", "drop_prob")


def describe_block(block: nn.Module, plan: BlockPlan) -> tuple[parts.DenseLayer, ...]:
    """The layers as plain tensors and numbers. Raises `NotLean`."""
    return tuple(_layer(block.get_submodule(layer.path), layer) for layer in plan.layers)


def _layer(layer: nn.Module, plan: LayerPlan) -> parts.DenseLayer:
    for name, module in layer.named_modules():
        check_unhooked(module, f"{plan.path}.{name}" if name else plan.path)
    if tuple(name for name, _ in leaves(layer)) != plan.leaves:
        raise NotLean(f"{plan.path} has other parts than when it was converted")
    first, *others = plan.steps
    size = 1 if others else 3
    norm1, conv1 = _step(layer, first, size, plan.path)
    norm2, conv2 = _step(layer, others[0], 3, plan.path) if others else (None, None)
    rate, channels = _dropout(layer, plan)
    return parts.DenseLayer(norm1, conv1, norm2, conv2, rate, channels)


def _step(owner: nn.Module, step: Step, size: int, path: str) -> tuple[parts.BatchNorm, parts.Convolution]:
    norm = _norm_and_relu(owner, step, path)
    return norm, describe_convolution(owner.get_submodule(step.conv), f"{path}.{step.conv}", size)


def _norm_and_relu(owner: nn.Module, step: Step, path: str) -> parts.BatchNorm:
    module, name = owner.get_submodule(step.norm), f"{path}.{step.norm}".lstrip(".")
    if step.act is not None:
        check_relu(owner.get_submodule(step.act), f"{path}.{step.act}".lstrip("."))
    if not norm_has_activation(module):
        return describe_norm(module, name)
    # a norm with its activation inside: whether it does no more than the two of them, the probe has shown
    for child_name, child in module.named_children():
        if child_name == "act":
            check_relu(child, f"{name}.act")
        elif not isinstance(child, nn.Identity):
            raise NotLean(f"{name}.{child_name} is a {type(child).__name__}, not an identity")
    check_unhooked(module, name)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return as_parts(module)


def _dropout(layer: nn.Module, plan: LayerPlan) -> tuple[float, bool]:
    """Rate (0 outside training) and whether whole channels are dropped."""
    if plan.dropout is not None:
        module: Any = layer.get_submodule(plan.dropout)
        if type(module) not in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
            raise NotLean(f"{plan.path}.{plan.dropout} is a {type(module).__name__}, not a dropout")
        return (module.p if module.training else 0.0), type(module) is not nn.Dropout
    for name in _DROP_RATES:
        rate = getattr(layer, name, None)
        if isinstance(rate, int | float):
            return (float(rate) if layer.training else 0.0), False
    return 0.0, False


def describe_transition(module: nn.Module, plan: TransitionPlan) -> parts.Transition:
    """The transition as plain tensors and numbers. Raises `NotLean`."""
    for name, child in module.named_modules():
        if name:
            check_unhooked(child, name)
    if tuple(name for name, _ in leaves(module)) != plan.leaves:
        raise NotLean("it has other parts than when it was converted")
    norm, conv = _step(module, plan.step, 1, "")
    pool: Any = module.get_submodule(plan.pool)
    settings = (
        _number(pool.kernel_size), _number(pool.stride), _number(pool.padding), pool.ceil_mode,
        getattr(pool, "divisor_override", None),
    )  # fmt: skip
    if type(pool) not in AVERAGE_POOLS or settings != (2, 2, 0, False, None):
        raise NotLean(f"{plan.pool} is not an average pool of 2 with stride 2")
    return parts.Transition(norm, conv)


def describe_stem(module: nn.Module, plan: StemPlan) -> parts.Stem:
    """The stem as plain tensors and numbers. Raises `NotLean`."""
    conv: Any = module.get_submodule(plan.step.conv)
    pool: Any = module.get_submodule(plan.pool)
    check_unhooked(pool, plan.pool)
    settings = tuple(_number(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    if type(pool) not in MAX_POOLS or (*settings, pool.return_indices, pool.ceil_mode) != (3, 2, 1, 1, False, False):
        raise NotLean(f"{plan.pool} is not a max pool of 3 with stride 2 and padding 1")
    described = describe_convolution(conv, plan.step.conv, 7, stride=2, padding=3)
    return parts.Stem(described, _norm_and_relu(module, plan.step, ""), tuple(conv.stride), (3,) * len(conv.stride))


def _number(value: Any) -> Any:
    """(2, 2) and 2 mean the same."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Say in a `NotLean` where the module stands."""
    try:
        yield
    except NotLean as reason:
        raise NotLean(f"{path}: {reason}") from None
