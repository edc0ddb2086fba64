"""The kernel of a structured global convolution, written to be read: numbers per scale, stretched and weighted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.sgconv_form import KernelForm


def stretch_piece(piece: Tensor, r: int, form: KernelForm) -> Tensor:
    """Interpolate (C, H, d) to (C, H, d * r).

    Tap q reads the piece at position (q + 1/2) / r - 1/2, held inside 0..d-1 ("half_pixel"); q (d-1) / (d r - 1)
    ("align_corners"); q (d-1) / (d r) ("drop_last": corners aligned on one tap more, which is dropped); or q / r with
    the first number once more behind the last ("wrap"). "nearest" reads number floor(q / r).
    """
    taps = piece.shape[-1] * r
    if form.interpolation == "nearest":
        return piece.repeat_interleave(r, dim=-1)
    if form.alignment == "half_pixel":
        return F.interpolate(piece, size=taps, mode="linear", align_corners=False)
    if form.alignment == "align_corners":
        return F.interpolate(piece, size=taps, mode="linear", align_corners=True)
    if form.alignment == "wrap":
        piece = torch.cat([piece, piece[..., :1]], dim=-1)
    return F.interpolate(piece, size=taps + 1, mode="linear", align_corners=True)[..., :-1]


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

    Args:
        pieces: S tensors (C, H, d), floating; computed in float32 at least.
        multiplier: (1, H, 1), or a scalar.
        decay: (H,) exponents of the power decay, or None.
        norm: (C, H, 1), or None for the raw kernel.
        form: how the pieces are combined.
        length: taps to build, at least 0.

    Returns:
        (C, H, length) in float32, or float64 for float64 pieces.
    """
    dtype = torch.promote_types(pieces[0].dtype, torch.float32)
    S, d = form.n_scales, form.kernel_dim
    parts: list[Tensor] = []
    for i, piece in enumerate(pieces):
        r = 2 ** ((max(0, i - 1) if form.combine == "cat" else i) + form.init_scale)
        stretched = stretch_piece(piece.to(dtype), r, form)
        parts.append(stretched * multiplier.to(dtype) ** (S - 1 - i))
    if form.combine == "cat":
        kernel = torch.cat(parts, dim=-1)
    else:
        kernel = torch.stack([F.pad(part, (0, form.taps - part.shape[-1])) for part in parts]).sum(0)
    assert kernel.shape[-1] == form.taps == d * 2 ** (S - 1 + form.init_scale)
    if decay is not None:
        steps = torch.arange(1, form.taps + 1, dtype=dtype, device=kernel.device)
        kernel = kernel * steps ** -decay.to(dtype).unsqueeze(-1)
    if norm is not None:
        kernel = kernel / norm.to(dtype)
    return F.pad(kernel[..., :length], (0, max(0, length - form.taps)))


def kernel_norm(pieces: Sequence[Tensor], multiplier: Tensor, decay: Tensor | None, form: KernelForm) -> Tensor:
    """L2 norm (C, H, 1) over the taps of the full raw kernel, without gradient."""
    with torch.no_grad():
        return sgconv_kernel(pieces, multiplier, decay, None, form, form.taps).norm(dim=-1, keepdim=True)
