"""The parts of a DenseNet as modules: `DenseLayer`, `DenseBlock`, `Transition`. State-dict keys are torchvision's.

Source: Huang et al. 2017, "Densely Connected Convolutional Networks", arXiv 1608.06993, section 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide import parts
from lowtide.errors import ArgumentError, describe
from lowtide.functional import dense_block, transition
from lowtide.levels import Level, check_level
from lowtide.nn.batch_norm import call_norm
from lowtide.nn.describe import (
    NotLean,
    check_no_global_hooks,
    check_relu,
    check_unhooked,
    describe_convolution,
    describe_norm,
    must_trace,
)

CONV: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM: dict[int, type[nn.modules.batchnorm._BatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
AVG_POOL: dict[int, type[nn.Module]] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
MAX_POOL: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


def check_spatial_dims(spatial_dims: int, where: str) -> int:
    """Return `spatial_dims` if it is 1, 2 or 3; raise `ArgumentError` otherwise."""
    if spatial_dims not in CONV:
        raise ArgumentError(describe(expected="spatial_dims to be 1, 2 or 3", got=repr(spatial_dims), where=where))
    return spatial_dims


def check_positive(value: int, name: str, where: str) -> int:
    """Return `value` if it is an integer of at least 1; raise `ArgumentError` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(describe(expected=f"{name} to be an integer >= 1", got=repr(value), where=where))
    return value


class DenseLayer(nn.Module):
    """norm1 - relu - conv1 (1x1, to bn_size * k channels) - norm2 - relu - conv2 (3x3, to k channels) - dropout.

    With `bn_size=None` there is no bottleneck: norm1 - relu - conv1 (3x3, to k channels) - dropout.
    Called by itself it is ordinary autograd and returns the k new channels alone, (N, c, *S) -> (N, k, *S).
    """

    def __init__(
        self,
        num_input_features: int,
        growth_rate: int,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        *,
        spatial_dims: int = 2,
    ) -> None:
        super().__init__()
        conv, norm = CONV[check_spatial_dims(spatial_dims, "DenseLayer")], NORM[spatial_dims]
        check_positive(num_input_features, "num_input_features", "DenseLayer")
        check_positive(growth_rate, "growth_rate", "DenseLayer")
        if not 0.0 <= drop_rate < 1.0:
            raise ArgumentError(describe(expected="drop_rate in [0, 1)", got=repr(drop_rate), where="DenseLayer"))
        self.drop_rate = float(drop_rate)
        self.norm1 = norm(num_input_features)
        self.relu1 = nn.ReLU()
        if bn_size is None:
            self.conv1 = conv(num_input_features, growth_rate, kernel_size=3, padding=1, bias=False)
        else:
            width = check_positive(bn_size, "bn_size", "DenseLayer") * growth_rate
            self.conv1 = conv(num_input_features, width, kernel_size=1, bias=False)
            self.norm2 = norm(width)
            self.relu2 = nn.ReLU()
            self.conv2 = conv(width, growth_rate, kernel_size=3, padding=1, bias=False)
        self.register_load_state_dict_pre_hook(_accept_other_spellings)

    @property
    def has_bottleneck(self) -> bool:
        return hasattr(self, "conv2")

    def forward(self, features: Tensor | Sequence[Tensor]) -> Tensor:
        x = features if isinstance(features, Tensor) else torch.cat(list(features), 1)
        new = self.conv1(self.relu1(call_norm(self.norm1, x)))
        if self.has_bottleneck:
            new = self.conv2(self.relu2(call_norm(self.norm2, new)))
        return F.dropout(new, self.drop_rate, self.training) if self.drop_rate > 0 else new

    def describe(self, name: str) -> parts.DenseLayer:
        """The layer as plain tensors and numbers. Raises `NotLean` where a child must be called itself."""
        check_unhooked(self, name)
        if type(self).forward is not DenseLayer.forward:
            raise NotLean(f"{name} has its own forward")
        expected = ["norm1", "relu1", "conv1", *(["norm2", "relu2", "conv2"] if self.has_bottleneck else [])]
        if list(self._modules) != expected:
            raise NotLean(f"{name} has other children than {', '.join(expected)}")
        check_relu(self.relu1, f"{name}.relu1")
        norm2 = conv2 = None
        if self.has_bottleneck:
            check_relu(self.relu2, f"{name}.relu2")
            norm2 = describe_norm(self.norm2, f"{name}.norm2")
            conv2 = describe_convolution(self.conv2, f"{name}.conv2", 3)
        return parts.DenseLayer(
            describe_norm(self.norm1, f"{name}.norm1"),
            describe_convolution(self.conv1, f"{name}.conv1", 1 if self.has_bottleneck else 3),
            norm2,
            conv2,
            self.drop_rate if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return f"drop_rate={self.drop_rate}" if self.drop_rate else ""


def _accept_other_spellings(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Keys "norm.1.weight" (old torchvision) and "layers.norm1.weight" (MONAI) become "norm1.weight"."""
    for name, _child in module.named_children():
        for other in (f"{name[:-1]}.{name[-1]}", f"layers.{name}"):
            for key in [k for k in state_dict if k.startswith(f"{prefix}{other}.")]:
                state_dict[f"{prefix}{name}{key[len(prefix) + len(other) :]}"] = state_dict.pop(key)


class DenseBlock(nn.Module):
    """A chain of dense layers, each fed with all earlier channels: (N, c0, *S) -> (N, c0 + num_layers * k, *S).

    Children are `denselayer1`, `denselayer2`, ... At a lean level (`recompute` other than "none") the block is one
    autograd node; with a hook on a child, or a child replaced, it runs the plain way and says so once.
    """

    recompute: Level

    def __init__(
        self,
        num_layers: int,
        num_input_features: int,
        bn_size: int | None = 4,
        growth_rate: int = 12,
        drop_rate: float = 0.0,
        *,
        spatial_dims: int = 2,
        recompute: Level = "pointwise",
    ) -> None:
        super().__init__()
        self.recompute = check_level(recompute, "DenseBlock")
        for i in range(check_positive(num_layers, "num_layers", "DenseBlock")):
            width = num_input_features + i * growth_rate
            layer = DenseLayer(width, growth_rate, bn_size, drop_rate, spatial_dims=spatial_dims)
            self.add_module(f"denselayer{i + 1}", layer)

    def __iter__(self) -> Iterator[DenseLayer]:
        return cast(Iterator[DenseLayer], self.children())

    def __len__(self) -> int:
        return len(self._modules)

    def set_recompute(self, level: Level) -> None:
        """Change what is kept for backward; parameters, outputs and random numbers stay the same."""
        self.recompute = check_level(level, "DenseBlock.set_recompute")

    def forward(self, x: Tensor) -> Tensor:
        layers = self.describe()
        return self.forward_plain(x) if layers is None else dense_block(x, layers, recompute=self.recompute)

    def run_with(self, x: Tensor, following: nn.Module, *, channels_last: bool | None = None) -> Tensor | None:
        """The block and the transition, or the last norm and the head, in one node; None if they must run one by one.

        What a sharded block calls instead of `forward`: its parameters and the transition's are gathered around it.
        """
        layers = self.describe()
        if layers is None:
            return None
        if isinstance(following, Transition):
            tail = following.describe()
        else:
            try:
                tail = parts.Head(describe_norm(following, "norm5"))
            except NotLean:  # a norm of another kind is called by itself, which is exact
                tail = None
        if tail is None:
            return None
        return dense_block(x, layers, tail, recompute=self.recompute, channels_last=channels_last)

    def describe(self) -> tuple[parts.DenseLayer, ...] | None:
        """The layers as plain tensors and numbers; None where the block has to run the plain way.

        That is at level "none", while somebody records operations (compile, export, trace), and, with one warning,
        where a child has a hook or was replaced.
        """
        if self.recompute == "none" or must_trace():
            return None
        try:
            check_no_global_hooks()
            return tuple(_describe_child(child, name) for name, child in self.named_children())
        except NotLean as reason:
            warn_plain(self, str(reason))
            return None

    def forward_plain(self, x: Tensor) -> Tensor:
        """The block in ordinary autograd, child by child."""
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}"


def _describe_child(child: nn.Module, name: str) -> parts.DenseLayer:
    if not isinstance(child, DenseLayer):
        raise NotLean(f"{name} is a {type(child).__name__}, not a DenseLayer")
    return child.describe(name)


def warn_plain(module: nn.Module, reason: str) -> None:
    """Say once per module that it runs the plain way."""
    if not module.__dict__.get("_warned_plain", False):
        module.__dict__["_warned_plain"] = True
        warnings.warn(
            f"{type(module).__name__} runs in ordinary autograd, with its memory, although recompute="
            f"{getattr(module, 'recompute', 'none')!r}: {reason}",
            stacklevel=3,
        )


class Transition(nn.Sequential):
    """norm - relu - conv (1x1) - average pool of 2: (N, c, *S) -> (N, num_output_features, *(S // 2))."""

    recompute: Level

    def __init__(
        self,
        num_input_features: int,
        num_output_features: int,
        *,
        spatial_dims: int = 2,
        recompute: Level = "pointwise",
    ) -> None:
        super().__init__()
        dims = check_spatial_dims(spatial_dims, "Transition")
        check_positive(num_output_features, "num_output_features", "Transition")
        self.recompute = check_level(recompute, "Transition")
        self.norm = NORM[dims](num_input_features)
        self.relu = nn.ReLU()
        self.conv = CONV[dims](num_input_features, num_output_features, kernel_size=1, bias=False)
        self.pool = AVG_POOL[dims](2, 2)

    def set_recompute(self, level: Level) -> None:
        """Change what is kept for backward; parameters, outputs and random numbers stay the same."""
        self.recompute = check_level(level, "Transition.set_recompute")

    def forward(self, input: Tensor) -> Tensor:
        described = self.describe()
        if described is not None:
            return transition(input, described, recompute=self.recompute)
        for child in self:
            input = call_norm(child, input)
        return input

    def describe(self) -> parts.Transition | None:
        """The transition as plain tensors and numbers; None where it has to run the plain way (see `DenseBlock`)."""
        if self.recompute == "none" or must_trace():
            return None
        try:
            check_no_global_hooks()
            if list(self._modules) != ["norm", "relu", "conv", "pool"]:
                raise NotLean("it has other children than norm, relu, conv, pool")
            check_relu(self.relu, "relu")
            check_unhooked(self.pool, "pool")
            if type(self.pool) not in AVG_POOL.values() or not _halves(self.pool):
                raise NotLean("pool is not an average pool of 2 with stride 2")
            return parts.Transition(describe_norm(self.norm, "norm"), describe_convolution(self.conv, "conv", 1))
        except NotLean as reason:
            warn_plain(self, str(reason))
            return None

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}"


def _halves(pool: nn.Module) -> bool:
    plain = nn.AvgPool2d(2, 2)
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    return all(_number(getattr(pool, name, None)) == _number(getattr(plain, name)) for name in names)


def _number(value: object) -> object:
    """(2, 2) and 2 mean the same."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
