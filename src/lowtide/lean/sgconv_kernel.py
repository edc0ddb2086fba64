"""The kernel of a structured global convolution, built where it is needed: exactly n taps of a few features.

How a piece is stretched, and the adjoint of it: `lowtide.lean.sgconv_cells`. Nothing is kept but the pieces.

    C kernels per feature (reverse ones behind), H features, d numbers per piece, S scales, n taps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, describe
from lowtide.lean.sgconv_cells import piece_gradient, scales, write_piece
from lowtide.sgconv_form import KernelForm

NORM_TILE_TAPS = 2**20


def _weights(multiplier: Tensor, norm: Tensor | None, power: int, dtype: torch.dtype) -> Tensor:
    """What the numbers of a piece are multiplied by: multiplier^power / norm, (C or 1, H or 1, 1) or a scalar."""
    weight = multiplier.to(dtype) ** power
    return weight if norm is None else weight / norm.to(dtype)


def _decay_taps(decay: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """((t+1)^(-decay) of (H, n), log(t+1) of (n,))."""
    log_steps = torch.arange(1, n + 1, dtype=torch.float64, device=decay.device).log_().to(dtype)
    return torch.exp(-decay.to(dtype).unsqueeze(-1) * log_steps), log_steps


def build(
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor | None,
    form: KernelForm,
    length: int,
    dtype: torch.dtype,
) -> Tensor:
    """The first `length` taps (C, H, length) of the kernels of the features given, without gradient."""
    kernel = pieces[0].new_empty(*pieces[0].shape[:2], length, dtype=dtype)
    if form.combine == "sum":
        kernel.zero_()
    else:
        kernel[..., form.taps :].zero_()
    for scale in scales(form, length):
        piece = pieces[scale.index].to(dtype) * _weights(multiplier, norm, scale.power, dtype)
        out = kernel[..., scale.offset : scale.offset + scale.taps]
        write_piece(piece, scale, form, out, add=form.combine == "sum")
    if decay is not None:
        kernel *= _decay_taps(decay, length, dtype)[0]
    return kernel


def pull_back(
    dkernel: Tensor,
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor | None,
    form: KernelForm,
    *,
    need_decay: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of the pieces that reach into the taps (None for the others), and of the decay.

    `dkernel` (C, H, n) is overwritten.
    """
    n, dtype = dkernel.shape[-1], dkernel.dtype
    ddecay = None
    if decay is not None:
        weight, log_steps = _decay_taps(decay, n, dtype)
        if need_decay:
            kernel = build(pieces, multiplier, decay, norm, form, n, dtype)
            ddecay = -(kernel.mul_(dkernel) * log_steps).sum(-1).sum(0)
        dkernel *= weight
    gradients: list[Tensor | None] = [None] * form.n_scales
    for scale in scales(form, n):
        taps = dkernel[..., scale.offset : scale.offset + scale.taps]
        gradient = piece_gradient(taps, form.kernel_dim, scale, form)
        gradients[scale.index] = gradient * _weights(multiplier, norm, scale.power, dtype)
    return gradients, ddecay


def sgconv_kernel(
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor | None,
    form: KernelForm,
    length: int,
) -> Tensor:
    """The first `length` taps of the kernel, zeros behind its last tap.

    k[t] = sum_i multiplier^(S-1-i) * piece_i stretched, at t;  times (t+1)^(-decay);  over norm.
    Backward: the adjoint of the stretching, two sums per cell.

    Args:
        pieces: S tensors (C, H, d), floating; computed in float32 at least.
        multiplier: (1, H, 1), or a scalar; a constant.
        decay: (H,) exponents of the power decay, or None.
        norm: (C, H, 1), or None for the raw kernel; a constant.
        form: how the pieces are combined.
        length: taps to build, at least 0; pieces and parts of pieces behind them are never made.

    Returns:
        (C, H, length) in float32, or float64 for float64 pieces.

    Saved: the arguments, C H d S numbers; no taps.
    Recomputed: with a learned decay, the kernel once.
    Exactness: the plain form's within rounding; sums over a cell are pairwise.
    Raises:
        UnsupportedError: a gradient for multiplier or norm is asked for, or a second derivative.
    Source: Li et al. 2022 (arXiv 2210.09298), section 3.
    """
    for name, constant in (("multiplier", multiplier), ("norm", norm)):
        if constant is not None and constant.requires_grad and torch.is_grad_enabled():
            where = "sgconv_kernel"
            raise UnsupportedError(
                describe(
                    expected=f"a constant {name}", got="requires_grad=True", where=where, fix="use recompute='none'"
                )
            )
    kernel: Any = _Kernel.apply(multiplier, decay, norm, form, length, *pieces)
    return kernel


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        multiplier: Tensor,
        decay: Tensor | None,
        norm: Tensor | None,
        form: KernelForm,
        length: int,
        *pieces: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(multiplier, decay, norm, *pieces)
        ctx.form = form
        return build(pieces, multiplier, decay, norm, form, length, torch.promote_types(pieces[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative("sgconv_kernel")
        multiplier, decay, norm, *pieces = ctx.saved_tensors
        need = ctx.needs_input_grad
        dkernel = grads[0].clone()
        dpieces, ddecay = pull_back(dkernel, pieces, multiplier, decay, norm, ctx.form, need_decay=need[1])
        cast = [torch.zeros_like(p) if g is None else g.to(p.dtype) for g, p in zip(dpieces, pieces, strict=True)]
        return (
            None,
            None if ddecay is None or decay is None else ddecay.to(decay.dtype),
            None,
            None,
            None,
            *(g if wanted else None for g, wanted in zip(cast, need[5:], strict=True)),
        )


def second_derivative(where: str) -> UnsupportedError:
    expected = "create_graph=False (the lean form has no second derivative)"
    return UnsupportedError(
        describe(expected=expected, got="create_graph=True", where=where, fix="use recompute='none'")
    )


def kernel_norm(pieces: Sequence[Tensor], multiplier: Tensor, decay: Tensor | None, form: KernelForm) -> Tensor:
    """L2 norm (C, H, 1) over all taps of the raw kernel, without gradient; in float64, a few features at a time."""
    dtype = torch.promote_types(pieces[0].dtype, torch.float32)
    C, H, _ = pieces[0].shape
    result = pieces[0].new_empty(C, H, 1, dtype=dtype)
    step = max(1, NORM_TILE_TAPS // (C * form.taps))
    with torch.no_grad():
        for start in range(0, H, step):
            hs = slice(start, min(start + step, H))
            part = multiplier if multiplier.dim() == 0 else multiplier[:, hs]
            kernel = build(
                [p[:, hs] for p in pieces], part, None if decay is None else decay[hs], None, form, form.taps, dtype
            )
            result[:, hs, 0] = torch.linalg.vector_norm(kernel, dim=-1, dtype=torch.float64).to(dtype)
    return result
