"""SGConv, structured global convolution (Li et al. 2022, arXiv 2210.09298): parameters, buffers and their life-cycle.

The arithmetic is `lowtide.functional.sgconv`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.functional import kernel_norm, sgconv, sgconv_kernel
from lowtide.levels import Level, check_level
from lowtide.nn.padding import PaddingSide, valid_positions
from lowtide.nn.sgconv_public import read_public
from lowtide.nn.sgconv_stream import StreamingSGConv
from lowtide.sequence_split import SequenceGroup, SequenceSplit
from lowtide.sgconv_form import (
    Activation,
    Alignment,
    Combine,
    Decay,
    Interpolation,
    KernelForm,
    LayerForm,
    Postact,
    check_choice,
    check_int,
    scales_for,
)

CONSTANTS = ("kernel_norm", "multiplier", "decay")


class SGConv(StreamingSGConv, nn.Module):
    """A convolution as long as the sequence, whose kernel is made of a few numbers per scale.

    y = W dropout(activation(conv(u, k) + D u)) + b, with k of kernel_dim * 2^(n_scales - 1 + init_scale) taps made of
    n_scales pieces of kernel_dim numbers; inputs further back than all the taps do not count.

    The norm. Taps of a long kernel add up: without a norm the output would grow with the number of taps (about 2e5 for
    a million taps). `kernel_norm` is the L2 norm of the full kernel at construction, before any cutting, so that the
    first output has the scale of the input whatever the length. It is made once, stored with the model, and constant in
    training. It carries no gradient and does not follow the kernel, although the kernel moves: it fixes the scale at
    initialisation and is not a constraint. A norm that followed the kernel would take away the direction in which the
    kernel grows or shrinks, and tie every tap's gradient to all others. `refresh_norm()` makes it anew on request. It
    stays float32 (float64 under `.double()`) through every cast; so do the weights of the scales: in half precision a
    norm overflows, and powers of a rounded multiplier are far off.

    The ends. With half-pixel centres ("half_pixel") the first and last half cell of each piece are flat. Scaling by
    distance (multiplier^(S-1-i), or a power of the distance) is an initialisation and a preconditioner: the weights
    could learn it, but one number of the last piece is worth thousands of taps, and a step of the optimiser moves them
    all. How much either matters, and rounding, has not been measured.

    Args:
        d_model: features H of the input and the output.
        l_max: the length that the kernel should reach; decides n_scales when that is None.
        kernel_dim: numbers per piece.
        n_scales: pieces; None: 1 + ceil(log2(l_max / kernel_dim)) - init_scale, at least 1.
        init_scale: doublings of the first piece's stretch.
        channels: outputs per input feature before the output map.
        bidirectional: a second kernel looks into the future (lags -1, -2, ...).
        init: pieces drawn from a normal distribution, or rows of cosines of 0..H-1 periods, permuted.
        combine, interpolation, alignment, decay: see `lowtide.sgconv_form.KernelForm`.
        decay_min, decay_max: multipliers per feature from min to max; for the power decays, exponents drawn from there.
        activation: gelu, relu, silu, tanh, sigmoid or identity.
        postact: "glu" gates the output map.
        dropout: rate; whole channels of a row when `transposed` or `tie_dropout`, else single numbers.
        tie_dropout: one mask for all positions.
        norm: a layer norm over channels between dropout and output map.
        linear: stop behind convolution and skip; the output has channels * d_model features.
        transposed: inputs are (B, H, L), else (B, L, H).
        recompute: memory level, see `lowtide.levels`; for this layer "block" is "layer".

    Saved for backward, in units of the input's bytes: 1 at "layer", 1 + channels at "pointwise", parameters on top.

    Raises:
        ArgumentError: an argument is out of range or unknown.
    """

    # set by lowtide.distributed.sequence_parallel: inputs are this rank's part of the time axis
    sequence_group: SequenceGroup | None = None

    def __init__(
        self,
        d_model: int,
        l_max: int,
        kernel_dim: int = 64,
        n_scales: int | None = None,
        init_scale: int = 0,
        channels: int = 1,
        bidirectional: bool = False,
        init: Literal["randn", "cos"] = "randn",
        combine: Combine = "cat",
        interpolation: Interpolation = "linear",
        alignment: Alignment = "half_pixel",
        decay: Decay = "scale",
        decay_min: float = 2.0,
        decay_max: float = 2.0,
        activation: Activation = "gelu",
        postact: Postact | None = None,
        dropout: float = 0.0,
        tie_dropout: bool = False,
        norm: bool = False,
        linear: bool = False,
        transposed: bool = True,
        recompute: Level = "pointwise",
    ) -> None:
        super().__init__()
        where = "SGConv"
        for name, value in (("d_model", d_model), ("l_max", l_max), ("kernel_dim", kernel_dim)):
            check_int(value, 1, name, where)
        check_int(init_scale, 0, "init_scale", where)
        check_choice(init, ("randn", "cos"), "init", where)
        if n_scales is None:
            n_scales = scales_for(l_max, kernel_dim, init_scale)
        form = KernelForm(kernel_dim, n_scales, init_scale, combine, interpolation, alignment, decay)
        self.form = LayerForm(
            kernel=form,
            channels=channels,
            bidirectional=bidirectional,
            activation=activation,
            postact=postact,
            drop_rate=dropout,
            drop_channels=transposed or tie_dropout,
            norm_eps=1e-5 if norm and not linear else None,
            linear=linear,
            transposed=transposed,
        )
        _check_decay(decay, decay_min, decay_max, n_scales)
        self.d_model, self.l_max, self.init = d_model, l_max, init
        self.recompute: Level = check_level(recompute, where)
        total = channels * (2 if bidirectional else 1)
        self.D = nn.Parameter(torch.randn(channels, d_model))
        self.kernel_list = nn.ParameterList(
            nn.Parameter(_piece(init, total, d_model, kernel_dim)) for _ in range(n_scales)
        )
        self.decay: Tensor | None
        if decay == "scale":
            self.register_buffer("multiplier", torch.linspace(decay_min, decay_max, d_model).view(1, d_model, 1))
            self.decay = None
        else:
            self.register_buffer("multiplier", torch.ones(()))
            exponents = torch.empty(d_model).uniform_(decay_min, decay_max)
            if decay == "power":
                self.decay = nn.Parameter(exponents)
            else:
                self.register_buffer("decay", exponents)
        self.multiplier: Tensor
        self.kernel_norm: Tensor
        self.register_buffer("kernel_norm", torch.ones(total, d_model, 1))
        self.refresh_norm()
        self.norm = nn.LayerNorm(channels * d_model) if norm and not linear else None
        outputs = d_model * (2 if postact == "glu" else 1)
        self.output_linear = None if linear else nn.Linear(channels * d_model, outputs)

    def forward(
        self,
        u: Tensor,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
        split: SequenceSplit | None = None,
    ) -> Tensor:
        """(B, H, L) -> (B, H, L), or (B, L, H) both when not `transposed`; channels * H features when `linear`.

        Args:
            u: floating, in the dtype of the parameters (or any under autocast).
            lengths: (B,) integers 0..L: how many positions of each row count; the output is 0 at the others, and what
                the input holds there does not matter. Each row's output is that of the row alone.
            padding_side: where the others are.
            split: for a layer of a split sequence, how it is split, if that is known; else the ranks tell each other.
        """
        time = 2 if self.form.transposed else 1
        if split is None and self.sequence_group is not None:
            split = self.sequence_group.split(u, time, lengths)
        valid = valid_positions(lengths, padding_side, u, time, split, "SGConv")
        output, norm = self.output_linear, self.norm
        return sgconv(
            u,
            list(self.kernel_list),
            self.multiplier,
            self.decay,
            self.kernel_norm,
            self.D,
            None if output is None else output.weight,
            None if output is None else output.bias,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            valid,
            form=self.form if self.training else self.form.without_dropout(),
            recompute=self.recompute,
            split=split,
        )

    def kernel(self, length: int) -> Tensor:
        """(C_total, H, length): the kernels over their norm, forward ones (lag j), then reverse ones (lag -(j+1))."""
        pieces = list(self.kernel_list)
        return sgconv_kernel(
            pieces, self.multiplier, self.decay, self.kernel_norm, self.form.kernel, length, recompute=self.recompute
        )

    def refresh_norm(self) -> None:
        """Make `kernel_norm` anew from the kernel as it is now: afterwards every full kernel has L2 norm 1."""
        norm = kernel_norm(list(self.kernel_list), self.multiplier, self.decay, self.form.kernel)
        self.kernel_norm.copy_(norm)

    def set_recompute(self, level: Level) -> None:
        """Change the memory level; nothing else changes."""
        self.recompute = check_level(level, "SGConv.set_recompute")

    def kernel_parameters(self) -> list[nn.Parameter]:
        """What makes the kernel, and trains at its own rate without weight decay: the pieces and a learned decay."""
        learned = [self.decay] if isinstance(self.decay, nn.Parameter) else []
        return [*self.kernel_list.parameters(), *learned]

    def load_public(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a state dict in the layout of the public code; nothing is changed if it does not fit.

        Accepted: `output_linear.0.*` beside `output_linear.*`, a bias (out, 1), `kernel_norm` (C_total, H, 1). A
        `kernel_norm` (H, 1), none at all, or `kernel_norm_initialized` 0 means that the norm was never made: it is made
        now. The file does not say how pieces are combined: construct the layer in the file's mode.

        Raises:
            CheckpointError: names or shapes are not those of this layer.
        """
        fitting, has_norm = read_public(state_dict, self.state_dict())
        self.load_state_dict(fitting)
        if not has_norm:
            self.refresh_norm()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SGConv:
        """Casts and moves: constants go to the new device, but only from float32 to float64 and back."""
        before = {name: self._buffers[name] for name in CONSTANTS if self._buffers.get(name) is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype not in (torch.float32, torch.float64):
                self._buffers[name] = old.to(device=new.device, dtype=torch.float32)
        return self

    def extra_repr(self) -> str:
        form, kernel = self.form, self.form.kernel
        return (
            f"{self.d_model}, l_max={self.l_max}, kernel_dim={kernel.kernel_dim}, n_scales={kernel.n_scales}, "
            f"taps={kernel.taps}, channels={form.channels}, bidirectional={form.bidirectional}, "
            f"combine={kernel.combine}, decay={kernel.decay}, recompute={self.recompute}"
        )


def _piece(init: str, rows: int, H: int, d: int) -> Tensor:
    if init == "randn":
        return torch.randn(rows, H, d)
    periods = torch.stack([torch.cos(torch.linspace(0.0, 2.0 * math.pi * i, d)) for i in range(H)])
    return torch.stack([periods[torch.randperm(H)] for _ in range(rows)])


def _check_decay(decay: str, least: float, most: float, n_scales: int) -> None:
    def finite(value: Any) -> bool:
        return isinstance(value, int | float) and math.isfinite(value)

    if not finite(least) or not finite(most) or least > most or (decay == "scale" and least <= 0):
        expected = "finite decay_min <= decay_max" + (", above 0" if decay == "scale" else "")
        raise ArgumentError(describe(expected=expected, got=f"{least!r}, {most!r}", where="SGConv"))
    if decay == "scale" and (n_scales - 1) * abs(math.log2(most)) > 60:
        got = f"{most}^{n_scales - 1}"
        fix = "lower decay_max or n_scales"
        raise ArgumentError(describe(expected="decay_max^(n_scales - 1) <= 2^60", got=got, where="SGConv", fix=fix))
