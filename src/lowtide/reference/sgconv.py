"""The SGConv layer, written to be read: kernel, long convolution, skip, activation, dropout, norm, output map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.reference.long_conv import long_conv
from lowtide.reference.sgconv_kernel import sgconv_kernel
from lowtide.sequence_split import SequenceSplit
from lowtide.sgconv_form import LayerForm


def activate(y: Tensor, name: str) -> Tensor:
    if name == "identity":
        return y
    functions = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
    return functions[name](y)


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
    split: SequenceSplit | None = None,
) -> Tensor:
    """y = output_map(layer_norm(dropout(activation(long_conv(u, kernel) + skip * u)))), 0 outside `valid`.

    Args:
        u: (B, H, L) if form.transposed, else (B, L, H).
        pieces, multiplier, decay, norm: as `sgconv_kernel`, C_total = C, or 2 C with the reverse kernels behind.
        skip: (C, H).
        weight, bias: (O, C*H) and (O,), O = H or 2 H with GLU; None when form.linear.
        norm_weight, norm_bias: (C*H,) of the layer norm over channels, or None.
        valid: (B, L) bool, False at padding, or None.
        form: everything that is not a tensor.
        split: u holds this rank's positions of a sequence that is split over ranks; the convolution runs on the whole
            length of this rank's share of the features.

    Returns:
        (B, H, L) or (B, L, H); with form.linear (B, C*H, L) or (B, L, C*H). Channel c of feature h is c*H + h.
    """
    u_BHL = u if form.transposed else u.transpose(1, 2)
    L = u_BHL.shape[-1]
    if valid is not None:
        u_BHL = torch.where(valid.unsqueeze(1), u_BHL, u_BHL.new_zeros(()))
    H = u_BHL.shape[1]
    if split is not None:
        share, L = split.share(H), split.length
        u_BHL, skip, norm = split.all_to_channels(u_BHL), skip[:, share], norm[:, share]
        pieces = [piece[:, share] for piece in pieces]
        multiplier = multiplier if multiplier.dim() == 0 else multiplier[:, share]
        decay = None if decay is None else decay[share]
    if u_BHL.shape[1]:
        kernel = sgconv_kernel(pieces, multiplier, decay, norm, form.kernel, min(L, form.kernel.taps))
        k, k_reverse = kernel.chunk(2) if form.bidirectional else (kernel, None)
        y = long_conv(u_BHL, k, skip, k_reverse=k_reverse)
    else:  # more ranks than features; interpolation refuses an empty batch
        y = u_BHL.unsqueeze(1).expand(-1, form.channels, -1, -1)
    if split is not None:
        y = split.all_to_time(y, H)
    y = y.flatten(1, 2)
    if not form.transposed:
        y = y.transpose(1, 2)
    if not form.linear:
        y = _pointwise(y, weight, bias, norm_weight, norm_bias, form, split)
    if valid is not None:
        y = torch.where(valid.unsqueeze(1 if form.transposed else 2), y, y.new_zeros(()))
    return y


def _pointwise(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    form: LayerForm,
    split: SequenceSplit | None,
) -> Tensor:
    """Everything behind the convolution; acts on each position by itself."""
    assert weight is not None
    channel_dim = 1 if form.transposed else 2
    y = activate(y, form.activation)
    if form.drop_rate > 0:
        keep = 1.0 - form.drop_rate
        shape = list(y.shape)
        if form.drop_channels:
            shape[3 - channel_dim] = 1
        mask = torch.empty(shape, dtype=torch.bool, device=y.device)
        if split is None:
            mask.bernoulli_(keep)
        elif form.drop_channels:  # alike on all ranks
            split.agree_(mask.bernoulli_(keep))
        else:
            mask.bernoulli_(keep, generator=split.own_generator(y.device))
        y = y * (mask.to(y.dtype) / keep)
    if form.norm_eps is not None:
        y = F.layer_norm(y.movedim(channel_dim, -1), (y.shape[channel_dim],), norm_weight, norm_bias, form.norm_eps)
        y = y.movedim(-1, channel_dim)
    if form.transposed:
        offset = weight.new_zeros(()) if bias is None else bias.unsqueeze(-1)
        y = torch.baddbmm(offset, weight.expand(y.shape[0], -1, -1), y)
    else:
        y = F.linear(y, weight, bias)
    return F.glu(y, dim=channel_dim) if form.postact == "glu" else y
