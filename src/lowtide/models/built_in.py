"""Small networks around single parts of lowtide, by name, each with an input: `lowtide verify lowtide:long_conv`.

What stands here has a plain form (recompute "none") and a lean one with the same parameters. Names are a part and a
form, `sgconv-power_decay`; the part's name alone is its usual form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import steps
from lowtide.functional import long_conv, norm_act_conv
from lowtide.levels import Level
from lowtide.models.densenet import DenseNet
from lowtide.models.sequence import SequenceModel
from lowtide.nn import DenseBlock, DenselyConnected, SGConv, Transition
from lowtide.nn.batch_norm import as_parts


@dataclass(frozen=True)
class BuiltIn:
    """`build` makes the network with weights of its own; `input` is a shape as the command line takes it."""

    build: Callable[[], nn.Module]
    input: str


class LongConv(nn.Module):
    """`long_conv` with parameters: y = conv(u, kernel), with a kernel into the future and a skip if asked for."""

    recompute: Level = "pointwise"

    def __init__(self, features: int, taps: int, *, channels: int = 1, two_sided: bool = False) -> None:
        super().__init__()
        shape = (features, taps) if channels == 1 else (channels, features, taps)
        self.kernel = nn.Parameter(torch.randn(shape) / taps**0.5)
        self.reverse = nn.Parameter(torch.randn(shape) / taps**0.5) if two_sided else None
        self.skip = nn.Parameter(torch.randn(shape[:-1]))

    def forward(self, u: Tensor) -> Tensor:
        return long_conv(u, self.kernel, self.skip, k_reverse=self.reverse, recompute=self.recompute)


_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "group": partial(nn.GroupNorm, 2),
}
_ACTIVATIONS: tuple[steps.Function, ...] = ("relu", "leaky_relu", "prelu", "silu", "gelu")


class NormActConv(nn.Module):
    """`norm_act_conv` with parameters, twice, so that a first one's output is a second one's input."""

    recompute: Level = "pointwise"

    def __init__(self, norm: str, activation: steps.Function, channels: int = 4) -> None:
        super().__init__()
        self.function: steps.Function = activation
        self.norms = nn.ModuleList(_NORMS[norm](channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.slopes = nn.Parameter(torch.full((channels,), 0.25)) if activation == "prelu" else None

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            act = steps.Activation(self.function, weight=self.slopes)
            ones = (1, 1)
            tail = steps.Conv(conv.weight, conv.bias, ones, ones, ones)  # pyright: ignore[reportArgumentType]
            x = norm_act_conv(x, _describe(norm), act, tail, recompute=self.recompute)
        return x


def _describe(norm: Any) -> steps.Norm:
    if isinstance(norm, nn.GroupNorm):
        return steps.GroupNorm(norm.num_groups, norm.weight, norm.bias, norm.eps)
    if isinstance(norm, nn.InstanceNorm2d):
        assert norm.momentum is not None
        moments = (norm.running_mean, norm.running_var)
        return steps.InstanceNorm(norm.weight, norm.bias, *moments, norm.eps, norm.momentum, norm.training)
    return as_parts(norm)


def _layer(channels: int, growth: int) -> nn.Module:
    conv = nn.Conv2d(channels, growth, 3, padding=1)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.SiLU(), conv, nn.Dropout(0.2))


def _densely_connected(*, new_first: bool = True) -> nn.Module:
    return DenselyConnected([_layer(6 + 4 * i, 4) for i in range(3)], new_first=new_first)


_SHAPES = {1: "3x8x19", 2: "3x8x7x9", 3: "2x8x5x6x4"}
_IMAGES = {1: "3x3x70", 2: "3x3x37x42", 3: "2x3x17x19x18"}


def _dense() -> dict[str, BuiltIn]:
    def block(**options: Any) -> Callable[[], nn.Module]:
        return partial(DenseBlock, 3, 8, growth_rate=4, **options)

    def network(dims: int, **options: Any) -> Callable[[], nn.Module]:
        return partial(DenseNet, 8, (2, 3), spatial_dims=dims, small_inputs=False, num_init_features=16, **options)

    table = {
        "dense_block": BuiltIn(block(), _SHAPES[2]),
        "dense_block-no_bottleneck": BuiltIn(block(bn_size=None), _SHAPES[2]),
        "dense_block-dropout": BuiltIn(block(drop_rate=0.2), _SHAPES[2]),
        "densenet-dropout": BuiltIn(network(2, drop_rate=0.2), _IMAGES[2]),
        "densenet-no_bottleneck": BuiltIn(network(2, bn_size=None), _IMAGES[2]),
    }
    for dims in (1, 2, 3):
        table[f"dense_block-{dims}d"] = BuiltIn(block(spatial_dims=dims), _SHAPES[dims])
        table[f"transition-{dims}d"] = BuiltIn(partial(Transition, 8, 4, spatial_dims=dims), _SHAPES[dims])
        table[f"densenet-{dims}d"] = BuiltIn(network(dims), _IMAGES[dims])
    return table


def _sgconv() -> dict[str, BuiltIn]:
    forms: dict[str, dict[str, Any]] = {
        "": {},
        "-sum": {"combine": "sum"},
        "-nearest": {"interpolation": "nearest"},
        "-align_corners": {"alignment": "align_corners"},
        "-drop_last": {"alignment": "drop_last"},
        "-wrap": {"alignment": "wrap"},
        "-cos": {"init": "cos"},
        "-power_fixed": {"decay": "power_fixed", "decay_min": 0.5, "decay_max": 1.5},
        "-power": {"decay": "power", "decay_min": 0.5, "decay_max": 1.5},
        "-bidirectional": {"bidirectional": True},
        "-channels": {"channels": 2, "bidirectional": True},
        "-init_scale": {"init_scale": 1},
        "-glu": {"postact": "glu"},
        "-relu": {"activation": "relu"},
        "-dropout": {"dropout": 0.2},
        "-norm": {"norm": True},
        "-linear": {"linear": True},
        "-positions_first": {"transposed": False, "dropout": 0.2, "tie_dropout": True},
    }
    shapes = {name: "2x50x6" if options.get("transposed") is False else "2x6x50" for name, options in forms.items()}
    return {
        f"sgconv{name}": BuiltIn(partial(SGConv, 6, 48, kernel_dim=4, **options), shapes[name])
        for name, options in forms.items()
    }


def _sequences() -> dict[str, BuiltIn]:
    forms: dict[str, tuple[dict[str, Any], str]] = {
        "": ({"bidirectional": True}, "3x32x2"),
        "-postnorm": ({"prenorm": False, "pool": "last"}, "3x32x2"),
        "-layer_norm": ({"norm": "layer", "postact": "glu", "dropout": 0.2}, "3x32x2"),
        "-per_position": ({"pool": None}, "3x32x2"),
        "-tokens": ({"embedding": 11, "bidirectional": True}, "3x32:11"),
    }
    return {
        f"sequence_model{name}": BuiltIn(partial(SequenceModel, 2, 5, 32, 2, 32, kernel_dim=4, **options), shape)
        for name, (options, shape) in forms.items()
    }


PARTS: dict[str, BuiltIn] = {
    **_dense(),
    "densely_connected": BuiltIn(_densely_connected, "3x6x7x9"),
    "densely_connected-new_last": BuiltIn(partial(_densely_connected, new_first=False), "3x6x7x9"),
    **{
        f"norm_act_conv-{norm}-{activation}": BuiltIn(partial(NormActConv, norm, activation), "3x4x9x10")
        for norm in _NORMS
        for activation in _ACTIVATIONS
    },
    "long_conv": BuiltIn(partial(LongConv, 5, 40), "2x5x64"),
    "long_conv-two_sided": BuiltIn(partial(LongConv, 5, 40, two_sided=True), "2x5x64"),
    "long_conv-channels": BuiltIn(partial(LongConv, 5, 90, channels=2, two_sided=True), "2x5x64"),
    **_sgconv(),
    **_sequences(),
}


def set_recompute(model: nn.Module, level: Level) -> None:
    """The level of every part of a network of lowtide."""
    for module in model.modules():
        if "recompute" in module.__dict__ or hasattr(type(module), "recompute"):
            module.__dict__["recompute"] = level
