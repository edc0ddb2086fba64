"""What an SGConv kernel is made of, as a value: the options that both twins read, and the limits they are held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lowtide.errors import ArgumentError, describe

Combine = Literal["cat", "sum"]
Interpolation = Literal["linear", "nearest"]
Alignment = Literal["half_pixel", "align_corners", "drop_last", "wrap"]
Decay = Literal["scale", "power_fixed", "power"]

# beyond this one channel's kernel alone takes a gibibyte: surely a mistake in n_scales or init_scale
MAX_TAPS = 2**28


def check_choice(value: object, allowed: Iterable[object], name: str, where: str) -> None:
    """Raise `ArgumentError`, listing the allowed values, unless `value` is one of them."""
    if value not in (choices := tuple(allowed)):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ArgumentError(describe(expected=f"{name} to be one of {listed}", got=repr(value), where=where))


def check_int(value: object, least: int, name: str, where: str) -> None:
    """Raise `ArgumentError` unless `value` is an int (not a bool) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(describe(expected=f"{name} to be an int >= {least}", got=repr(value), where=where))


def scales_for(l_max: int, kernel_dim: int, init_scale: int) -> int:
    """The number of scales whose taps reach l_max: 1 + ceil(log2(l_max / kernel_dim)) - init_scale, at least 1.

    >>> scales_for(4096, 32, 0), scales_for(16384, 64, 1), scales_for(1, 64, 0)
    (8, 8, 1)
    """
    doublings = (-(-l_max // kernel_dim) - 1).bit_length()  # ceil(log2) in whole numbers; negative ones end as 1 below
    return max(1, 1 + doublings - init_scale)


@dataclass(frozen=True)
class KernelForm:
    """How pieces of `kernel_dim` numbers become one kernel of `taps` taps.

    Piece i = 0..n_scales-1 is stretched 2^(max(0, i-1) + init_scale) times and laid behind the piece before it ("cat"),
    or stretched 2^(i + init_scale) times and added from tap 0 on ("sum"). It is weighted by
    multiplier^(n_scales-1-i); with a power decay tap t is weighted by (t+1)^(-decay) as well.

    Raises:
        ArgumentError: an option is not in its list, a count is below its least value, or the taps exceed `MAX_TAPS`.
    """

    kernel_dim: int
    n_scales: int
    init_scale: int = 0
    combine: Combine = "cat"
    interpolation: Interpolation = "linear"
    alignment: Alignment = "half_pixel"
    decay: Decay = "scale"

    def __post_init__(self) -> None:
        where = "SGConv"
        check_int(self.kernel_dim, 1, "kernel_dim", where)
        check_int(self.n_scales, 1, "n_scales", where)
        check_int(self.init_scale, 0, "init_scale", where)
        check_choice(self.combine, get_args(Combine), "combine", where)
        check_choice(self.interpolation, get_args(Interpolation), "interpolation", where)
        check_choice(self.alignment, get_args(Alignment), "alignment", where)
        check_choice(self.decay, get_args(Decay), "decay", where)
        if self.interpolation == "nearest" and self.alignment != "half_pixel":
            raise ArgumentError(
                describe(
                    expected="alignment 'half_pixel' with interpolation 'nearest' (the others only move linear cells)",
                    got=repr(self.alignment),
                    where=where,
                )
            )
        if self.n_scales + self.init_scale > 64 or self.taps > MAX_TAPS:
            raise ArgumentError(
                describe(
                    expected=f"kernel_dim * 2^(n_scales - 1 + init_scale) <= 2^28 = {MAX_TAPS} taps",
                    got=f"{self.kernel_dim} * 2^{self.n_scales - 1 + self.init_scale}",
                    where=where,
                    fix="lower n_scales or init_scale",
                )
            )

    @property
    def taps(self) -> int:
        """Taps of the full kernel: kernel_dim * 2^(n_scales - 1 + init_scale), for both ways to combine."""
        return self.kernel_dim * 2 ** (self.n_scales - 1 + self.init_scale)


Activation = Literal["gelu", "relu", "silu", "tanh", "sigmoid", "identity"]
Postact = Literal["glu"]


@dataclass(frozen=True)
class LayerForm:
    """What an SGConv layer does around its kernel. `drop_rate` is 0 outside training.

    drop_channels: dropout zeroes whole channels of a row, not single numbers. linear: stop behind convolution and skip.
    """

    kernel: KernelForm
    channels: int = 1
    bidirectional: bool = False
    activation: Activation = "gelu"
    postact: Postact | None = None
    drop_rate: float = 0.0
    drop_channels: bool = True
    norm_eps: float | None = None
    linear: bool = False
    transposed: bool = True

    def __post_init__(self) -> None:
        where = "SGConv"
        check_int(self.channels, 1, "channels", where)
        check_choice(self.activation, get_args(Activation), "activation", where)
        check_choice(self.postact, (None, *get_args(Postact)), "postact", where)
        if not 0.0 <= self.drop_rate < 1.0:
            raise ArgumentError(describe(expected="0 <= dropout < 1", got=repr(self.drop_rate), where=where))

    def without_dropout(self) -> LayerForm:
        return self if self.drop_rate == 0 else replace(self, drop_rate=0.0)
