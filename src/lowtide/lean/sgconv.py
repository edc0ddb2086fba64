"""The SGConv layer as one autograd node: convolution, skip, activation, dropout, norm and output map in little memory.

B batch, C kernels per feature, H features, L length, K taps, O output channels before GLU, T positions of a tile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import alike
from lowtide.lean import sgconv_split
from lowtide.lean.fft_frames import Frames, Taps, convolve, convolve_backward
from lowtide.lean.sgconv_kernel import build, pull_back, second_derivative
from lowtide.lean.sgconv_pointwise import Call, draw_mask, pointwise_forward
from lowtide.lean.sgconv_pointwise_backward import pointwise_backward
from lowtide.levels import Level
from lowtide.sequence_split import SequenceSplit
from lowtide.sgconv_form import LayerForm

# features copied together where time is not the last axis: one cache line of them
STRIDED_GROUP = 16


@dataclass(frozen=True)
class Kernels:
    """The tensors that the taps are made of; the reverse kernels are the second half of the first axis."""

    pieces: Sequence[Tensor]
    multiplier: Tensor
    decay: Tensor | None
    norm: Tensor
    skip: Tensor
    form: LayerForm
    dtype: torch.dtype

    def of(self, features: slice, reverse: bool) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor]:
        C = self.form.channels
        rows = slice(C, 2 * C) if reverse else slice(0, C)
        multiplier = self.multiplier if self.multiplier.dim() == 0 else self.multiplier[:, features]
        decay = None if self.decay is None else self.decay[features]
        return [p[rows, features] for p in self.pieces], multiplier, decay, self.norm[rows, features]

    def taps(self, features: slice, K: int, R: int) -> Taps:
        forward = build(*self.of(features, False), self.form.kernel, K, self.dtype)
        return forward, build(*self.of(features, True), self.form.kernel, R, self.dtype) if R else None


def sgconv(
    u: Tensor,
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor,
    skip: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    form: LayerForm,
    recompute: Level = "layer",
    tile_bytes: int | None = None,
    split: SequenceSplit | None = None,
) -> Tensor:
    """y = output_map(layer_norm(dropout(activation(long_conv(u, kernel) + skip * u)))), 0 outside `valid`.

    Backward: dp = d(pointwise)/dp * dy, p the pre-activation, tile by tile over time; then, a few features at a time,
    du and dk as `long_conv`, and the pieces' gradient by the adjoint of the stretching.

    Args:
        u: (B, H, L) if form.transposed, else (B, L, H).
        pieces, multiplier, decay, norm: as `sgconv_kernel`, C_total = C, or 2 C with the reverse kernels behind.
        skip: (C, H).
        weight, bias: (O, C*H) and (O,), O = H or 2 H with GLU; None when form.linear.
        norm_weight, norm_bias: (C*H,) of the layer norm over channels, or None.
        valid: (B, L) bool, False at padding, or None.
        form: everything that is not a tensor.
        recompute: "pointwise" keeps the pre-activation, "layer" and "block" do not.
        tile_bytes: bound for one buffer of a tile of the convolution, see `long_conv`.
        split: u holds this rank's positions of a sequence that is split over ranks, see `lowtide.lean.sgconv_split`.

    Returns:
        (B, H, L) or (B, L, H); with form.linear (B, C*H, L) or (B, L, C*H). Channel c of feature h is c*H + h.

    Saved: u, B H L itemsize = 1 U; at "pointwise" also the pre-activation, C U (not with form.linear); the parameters;
        `valid`; with dropout one random state, or the (B, C*H) mask of whole channels.
    Recomputed: taps, spectra, everything pointwise; at "layer" the convolution too. Random numbers are drawn once.
    Exactness: the plain form's values and gradients within rounding; the same random numbers, in the same order.
    Raises:
        UnsupportedError: a second derivative.
    Source: Li et al. 2022 (arXiv 2210.09298).
    """
    tensors = (u, multiplier, decay, norm, skip, weight, bias, norm_weight, norm_bias, valid, *pieces)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    device_type = u.device.type
    call = Call(
        form=form,
        keep_preactivation=needs_grad and recompute == "pointwise" and not form.linear,
        tile_bytes=tile_bytes,
        device_type=device_type,
        autocast=torch.is_autocast_enabled(device_type),
        autocast_dtype=torch.get_autocast_dtype(device_type),
        split=split,
    )
    y: Any = _SGConv.apply(call, *tensors)
    return y


class _SGConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        u: Tensor,
        multiplier: Tensor,
        decay: Tensor | None,
        norm: Tensor,
        skip: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        valid: Tensor | None,
        *pieces: Tensor,
    ) -> Tensor:
        ctx.call = call
        kernels = Kernels(pieces, multiplier, decay, norm, skip, call.form, _computing_dtype(u, pieces))
        if call.split is not None:
            u = sgconv_split.own_channels(_by_time(u, call.form), valid, call.split)
        p_BDL = _preactivation(u, kernels, valid, call)
        state, mask = draw_mask(p_BDL, call.form, call.split)
        y = pointwise_forward(p_BDL, weight, bias, norm_weight, norm_bias, valid, mask, call)
        ctx.save_for_backward(
            u,
            p_BDL if call.keep_preactivation else None,
            state,
            mask if call.form.drop_channels else None,
            multiplier,
            decay,
            norm,
            skip,
            weight,
            bias,
            norm_weight,
            norm_bias,
            valid,
            *pieces,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative("SGConv")
        (dy,) = grads
        call: Call = ctx.call
        u, kept, state, mask, multiplier, decay, norm, skip, weight, bias, norm_weight, norm_bias, valid, *pieces = (
            ctx.saved_tensors
        )
        need = ctx.needs_input_grad[1:]
        need_u, need_kernel = need[0], need[2] or need[4] or any(need[10:])
        form = call.form
        kernels = Kernels(pieces, multiplier, decay, norm, skip, form, _computing_dtype(u, pieces))
        parameters = [weight, bias, norm_weight, norm_bias]
        if form.linear:
            dparameters: list[Tensor | None] = [None] * 4
            dp_BDL = _by_time(dy, form)
            if valid is not None:
                dp_BDL = dp_BDL.masked_fill(~valid.unsqueeze(1), 0)
            ours = valid is not None
        else:
            p_BDL = kept if kept is not None else _preactivation(u, kernels, valid, call)
            if state is not None:
                _, mask = draw_mask(p_BDL, form, call.split, replay=state)
            dp_BDL = (torch.empty_like(p_BDL) if kept is not None else p_BDL) if need_u or need_kernel else None
            dparameters = pointwise_backward(p_BDL, dy, dp_BDL, parameters, need[5:9], valid, mask, call)
            ours = True
        du, dkernels = None, _KernelGradients(kernels, need[2], need[4], need[10:])
        if dp_BDL is not None and (need_u or need_kernel):
            du = _convolution_backward(u, dp_BDL, kernels, dkernels if need_kernel else None, need_u, ours, valid, call)
        return (None, du, None, dkernels.decay, None, dkernels.skip, *dparameters, None, *dkernels.pieces)


def _computing_dtype(u: Tensor, pieces: Sequence[Tensor]) -> torch.dtype:
    return torch.promote_types(torch.promote_types(u.dtype, pieces[0].dtype), torch.float32)


def _by_time(u: Tensor, form: LayerForm) -> Tensor:
    """(B, H, L), a view."""
    return u if form.transposed else u.transpose(1, 2)


def _feature_groups(u_BHL: Tensor) -> list[slice]:
    """All features at once where time is contiguous; else a few, copied together."""
    H = u_BHL.shape[1]
    step = H if u_BHL.stride(-1) == 1 else STRIDED_GROUP
    return [slice(i, min(i + step, H)) for i in range(0, H, max(1, step))]


def _plan(u_BHL: Tensor, kernels: Kernels, call: Call) -> Frames:
    K = min(kernels.form.kernel.taps, u_BHL.shape[-1])
    R = min(kernels.form.kernel.taps, u_BHL.shape[-1] - 1) if kernels.form.bidirectional else 0
    return Frames.plan(u_BHL, kernels.form.channels, K, R, kernels.dtype, call.tile_bytes)


def _shift(features: slice, by: int) -> slice:
    return slice(features.start + by, features.stop + by)


def _preactivation(u: Tensor, kernels: Kernels, valid: Tensor | None, call: Call) -> Tensor:
    """(B, C*H, L) in u's dtype: convolution and skip."""
    if call.split is not None:

        def run(part: Tensor, features: slice, out: Tensor) -> None:
            _convolve(part, features, kernels, None, call, out)

        return sgconv_split.preactivation(u, call.form.channels, kernels.skip.shape[1], call.split, run)
    u_BHL = _by_time(u, call.form)
    B, H, L = u_BHL.shape
    p_BDL = u.new_empty(B, call.form.channels * H, L)
    p_BCHL = p_BDL.view(B, call.form.channels, H, L)
    for group in alike(_feature_groups(u_BHL)):
        part = u_BHL[:, group].contiguous() if u_BHL.stride(-1) != 1 else u_BHL[:, group]
        _convolve(part, group, kernels, valid, call, p_BCHL[:, :, group])
    return p_BDL


def _convolve(
    u_BhL: Tensor, features: slice, kernels: Kernels, valid: Tensor | None, call: Call, p_BChL: Tensor
) -> None:
    """Convolution and skip of some features."""
    plan = _plan(u_BhL, kernels, call)

    def taps_of(hs: slice) -> Taps:
        return kernels.taps(_shift(hs, features.start), plan.K, plan.R)

    with call.convolution_context():
        skip = kernels.skip[:, features].to(kernels.dtype)
        convolve(u_BhL, taps_of, skip, p_BChL, plan, kernels.dtype, valid)


class _KernelGradients:
    """Collects what `convolve_backward` hands over: gradients of skip, pieces and decay, in the computing dtype."""

    def __init__(self, kernels: Kernels, need_decay: bool, need_skip: bool, need_pieces: Sequence[bool]) -> None:
        self._kernels = kernels
        self.skip = torch.zeros_like(kernels.skip) if need_skip else None
        self.decay = torch.zeros_like(kernels.decay) if need_decay and kernels.decay is not None else None
        self.pieces = [
            torch.zeros_like(piece) if needed else None
            for piece, needed in zip(kernels.pieces, need_pieces, strict=True)
        ]

    def take(self, features: slice, forward: Tensor, reverse: Tensor | None) -> None:
        if self.skip is not None:
            self.skip[:, features] = forward[..., 0].to(self.skip.dtype)
        if self.decay is None and all(p is None for p in self.pieces):
            return
        C = self._kernels.form.channels
        for rows, taps in ((slice(0, C), forward), (slice(C, 2 * C), reverse)):
            if taps is None:
                continue
            made_of = self._kernels.of(features, rows.start > 0)
            dpieces, ddecay = pull_back(taps, *made_of, self._kernels.form.kernel, need_decay=self.decay is not None)
            for total, part in zip(self.pieces, dpieces, strict=True):
                if total is not None and part is not None:
                    total[rows, features] = part.to(total.dtype)
            if self.decay is not None and ddecay is not None:
                self.decay[features] += ddecay.to(self.decay.dtype)


def _convolution_backward(
    u: Tensor,
    dp_BDL: Tensor,
    kernels: Kernels,
    dkernels: _KernelGradients | None,
    need_u: bool,
    ours: bool,
    valid: Tensor | None,
    call: Call,
) -> Tensor | None:
    """du in u's layout. It takes the place of dp where dp is `ours` and has the same shape."""
    form = call.form
    H = kernels.skip.shape[1]
    in_place = ours and form.transposed and form.channels == 1 and dp_BDL.dtype == u.dtype
    dp_BCHL = dp_BDL.unflatten(1, (form.channels, H))
    du = None
    if need_u:
        B, _, L = dp_BDL.shape
        du = dp_BDL if in_place else u.new_empty((B, H, L) if form.transposed else (B, L, H))
    du_BHL = None if du is None else _by_time(du, form)
    if call.split is not None:

        def run(part: Tensor, features: slice, dp: Tensor, dpart: Tensor | None) -> None:
            _convolve_backward(part, features, kernels, dp, dpart, dkernels, None, call)

        sgconv_split.gradients(u, dp_BCHL, du_BHL, valid, call.split, run)
        return du
    u_BHL = _by_time(u, form)
    for group in alike(_feature_groups(u_BHL)):
        part = u_BHL[:, group].contiguous() if u_BHL.stride(-1) != 1 else u_BHL[:, group]
        dpart = None
        if du_BHL is not None:
            dpart = du_BHL[:, group] if du_BHL.stride(-1) == 1 else torch.empty_like(part)
        _convolve_backward(part, group, kernels, dp_BCHL[:, :, group], dpart, dkernels, valid, call)
        if du_BHL is not None and dpart is not None and du_BHL.stride(-1) != 1:
            du_BHL[:, group].copy_(dpart)
    return du


def _convolve_backward(
    u_BhL: Tensor,
    features: slice,
    kernels: Kernels,
    dp_BChL: Tensor,
    du_BhL: Tensor | None,
    dkernels: _KernelGradients | None,
    valid: Tensor | None,
    call: Call,
) -> None:
    """The gradients of `_convolve`: du is written, the kernels' are handed to `dkernels`."""
    plan = _plan(u_BhL, kernels, call)

    def taps_of(hs: slice) -> Taps:
        return kernels.taps(_shift(hs, features.start), plan.K, plan.R)

    def sink(hs: slice, forward: Tensor, reverse: Tensor | None) -> None:
        assert dkernels is not None
        dkernels.take(_shift(hs, features.start), forward, reverse)

    with call.convolution_context():
        skip = kernels.skip[:, features].to(kernels.dtype)
        use = None if dkernels is None else sink
        convolve_backward(u_BhL, taps_of, skip, dp_BChL, du_BhL, use, plan, kernels.dtype, valid)
