"""The functions of SGConv: plain (`lowtide.reference`) or lean (`lowtide.lean`), chosen by `recompute`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.lean import long_conv as lean
from lowtide.lean import sgconv as lean_layer
from lowtide.lean import sgconv_kernel as lean_kernel
from lowtide.levels import Level, check_level
from lowtide.reference import long_conv as plain
from lowtide.reference import sgconv as plain_layer
from lowtide.reference import sgconv_kernel as plain_kernel
from lowtide.sequence_split import SequenceSplit
from lowtide.sgconv_form import KernelForm, LayerForm

kernel_norm = lean_kernel.kernel_norm


def long_conv(
    u: Tensor,
    k: Tensor,
    skip: Tensor | None = None,
    *,
    k_reverse: Tensor | None = None,
    recompute: Level = "pointwise",
    exact_causal: bool = False,
    tile_bytes: int | None = None,
) -> Tensor:
    """y[t] = sum_j k[j] u[t-j] + sum_j k_reverse[j] u[t+j+1] + skip * u[t].

    Args:
        u: (B, H, L), any floating dtype and strides; half precision is computed in float32, float64 in float64.
        k: (H, K) or (C, H, K), any K; taps past L do not matter and get gradient 0.
        skip: (H,) or (C, H).
        k_reverse: as k, any length; tap j has lag -(j+1).
        recompute: "none" is ordinary autograd; the other levels are one and the same here.
        exact_causal: confine NaN, Inf and the rounding of huge values to the present and future of the sample that
            brings them; about log2(L) times the work. Not with k_reverse.
        tile_bytes: bound for one buffer of real rows in a tile of the lean form (about seven live at once).

    Returns:
        (B, H, L), or (B, C, H, L) for a k with channels, in u's dtype.

    Saved: B H L itemsize for u, and k, k_reverse, skip; no spectrum. Double backward is supported.
    Raises:
        ArgumentError: shapes or dtypes that do not fit, an unknown level, exact_causal with k_reverse.
    """
    where = "long_conv"
    level = check_level(recompute, where)
    _check(u, k, skip, k_reverse, where)
    if exact_causal and k_reverse is not None:
        got = "exact_causal=True and k_reverse"
        raise ArgumentError(
            describe(expected="a causal kernel alone", got=got, where=where, fix="leave one of them out")
        )
    if tile_bytes is not None and tile_bytes < 1:
        raise ArgumentError(describe(expected="tile_bytes >= 1, or None", got=repr(tile_bytes), where=where))
    if u.shape[-1] == 0:
        return u.clone() if k.dim() == 2 else u.unsqueeze(1).expand(-1, k.shape[0], -1, -1).clone()
    function = plain.long_conv if level == "none" else lean.long_conv
    return function(u, k, skip, k_reverse=k_reverse, exact_causal=exact_causal, tile_bytes=tile_bytes)


def _check(u: Tensor, k: Tensor, skip: Tensor | None, k_reverse: Tensor | None, where: str) -> None:
    def shape(x: Tensor) -> str:
        return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"

    if u.dim() != 3 or not u.is_floating_point():
        raise ArgumentError(describe(expected="u (B, H, L) of a floating dtype", got=shape(u), where=where))
    H = u.shape[1]
    if k.dim() not in (2, 3) or k.shape[-2] != H or not k.is_floating_point() or k.device != u.device:
        expected = f"k ({H}, K) or (C, {H}, K), floating, on {u.device}"
        raise ArgumentError(describe(expected=expected, got=shape(k), where=where))
    for name, x, wanted in (("skip", skip, k.shape[:-1]), ("k_reverse", k_reverse, (*k.shape[:-1], "R"))):
        if x is None:
            continue
        lead = x.shape[: k.dim() - 1]
        if x.dim() != len(wanted) or lead != k.shape[:-1] or not x.is_floating_point() or x.device != u.device:
            expected = f"{name} ({', '.join(map(str, wanted))}), floating, on {u.device}"
            raise ArgumentError(describe(expected=expected, got=shape(x), where=where))


def sgconv_kernel(
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor | None,
    form: KernelForm,
    length: int,
    *,
    recompute: Level = "pointwise",
) -> Tensor:
    """The first `length` taps (C, H, length) of an SGConv kernel; arguments as `lowtide.lean.sgconv_kernel`.

    Raises:
        ArgumentError: an unknown level, or a negative length.
        UnsupportedError: at a lean level, a gradient for multiplier or norm, or a second derivative.
    """
    where = "sgconv_kernel"
    level = check_level(recompute, where)
    if length < 0:
        raise ArgumentError(describe(expected="length >= 0", got=repr(length), where=where))
    function = plain_kernel.sgconv_kernel if level == "none" else lean_kernel.sgconv_kernel
    return function(pieces, multiplier, decay, norm, form, length)


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
    recompute: Level = "pointwise",
    tile_bytes: int | None = None,
    split: SequenceSplit | None = None,
) -> Tensor:
    """The SGConv layer: convolution, skip, activation, dropout, norm, output map. Arguments as `lowtide.lean.sgconv`.

    Saved: 1 U at "layer" and "block" (U: the bytes of u), 1 + channels U at "pointwise", parameters on top.
    Raises:
        ArgumentError: an unknown level, an input of another shape, dtype or device than the parameters ask for.
        UnsupportedError: at a lean level, a gradient for multiplier or norm, or a second derivative.
    """
    where = "sgconv"
    level = check_level(recompute, where)
    H, axes = skip.shape[1], "(B, H, L)" if form.transposed else "(B, L, H)"
    if u.dim() != 3 or u.shape[1 if form.transposed else 2] != H or not u.is_floating_point():
        got = f"{tuple(u.shape)} {str(u.dtype).removeprefix('torch.')}"
        raise ArgumentError(describe(expected=f"u {axes} with H = {H}, floating", got=got, where=where))
    if u.device != skip.device:
        fix = "move the input or the layer"
        raise ArgumentError(describe(expected=f"u on {skip.device}", got=str(u.device), where=where, fix=fix))
    if weight is not None and weight.dtype != u.dtype and not torch.is_autocast_enabled(u.device.type):
        fix = "cast one of them, or use torch.autocast"
        raise ArgumentError(describe(expected=f"u in {weight.dtype}", got=str(u.dtype), where=where, fix=fix))
    if (u.shape[1] * u.shape[2] if split is None else split.length) == 0:
        raise ArgumentError(describe(expected="a length of at least 1", got=str(tuple(u.shape)), where=where))
    arguments = (u, pieces, multiplier, decay, norm, skip, weight, bias, norm_weight, norm_bias, valid)
    if level == "none":
        return plain_layer.sgconv(*arguments, form=form, split=split)
    if torch.is_grad_enabled() and (multiplier.requires_grad or norm.requires_grad):
        expected, got = "constant multiplier and norm", "requires_grad=True"
        raise UnsupportedError(describe(expected=expected, got=got, where=where, fix="use recompute='none'"))
    return lean_layer.sgconv(*arguments, form=form, recompute=level, tile_bytes=tile_bytes, split=split)
