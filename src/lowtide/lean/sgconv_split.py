"""The long convolution of a sequence that is split over ranks in time: each rank convolves whole channels of its share.

    u (B, H, T) -- all-to-all --> (B, h, L) -- convolution --> (B, C, h, L) -- all-to-all --> p (B, C, H, T)
    dp (B, C, H, T) -- all-to-all --> (B, C, h, L) -- its adjoint --> (B, h, L) -- all-to-all --> du (B, H, T)

The channels come and go in a few parts, so that beside u and p there are only the buffers of one part.

Saved: (B, h, L) instead of u, the same bytes but for rounding: B H L itemsize / P. It need not come a second time.
Traffic: with U = B H L itemsize / P and q = (P - 1) / P of what a rank holds leaving it, q U for u and q C U for p; in
    backward q C U for dp and q U for du, and where p is not kept q C U once more.
Source: Jacobs et al. 2023, arXiv 2309.14509 (the exchange, for attention heads).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lowtide.sequence_split import SequenceSplit

# (u of some features, which of all H, out) -> None: write their convolution (B, C, w, L)
Convolve = Callable[[Tensor, slice, Tensor], None]
# (u, which of all H, dp, du or None) -> None: write du, which may be the memory of dp; hand on the kernels' gradients
ConvolveBackward = Callable[[Tensor, slice, Tensor, Tensor | None], None]


def own_channels(u_BHT: Tensor, valid_BT: Tensor | None, split: SequenceSplit) -> Tensor:
    """(B, h, L): this rank's share of the features, whole; 0 where `valid` is False."""
    B, H, _ = u_BHT.shape
    share = split.share(H)
    u_BhL = u_BHT.new_empty(B, share.stop - share.start, split.length)
    for part in split.parts(H, B * split.length * u_BHT.element_size()):
        u_BhL[:, part.place] = split.to_channels(u_BHT, part, valid_BT)
    return u_BhL


def preactivation(u_BhL: Tensor, C: int, H: int, split: SequenceSplit, convolve: Convolve) -> Tensor:
    """(B, C*H, T)."""
    B, _, L = u_BhL.shape
    p_BCHT = u_BhL.new_empty(B, C, H, split.held)
    for part in split.parts(H, B * L * u_BhL.element_size()):
        u_BwL = u_BhL[:, part.place]
        p_BCwL = u_BhL.new_empty(B, C, u_BwL.shape[1], L)
        if u_BwL.shape[1]:
            convolve(u_BwL, part.own, p_BCwL)
        split.to_time(p_BCwL, part, p_BCHT)
    return p_BCHT.flatten(1, 2)


def gradients(
    u_BhL: Tensor,
    dp_BCHT: Tensor,
    du_BHT: Tensor | None,
    valid_BT: Tensor | None,
    split: SequenceSplit,
    convolve_backward: ConvolveBackward,
) -> None:
    """Write du, which may be the memory of dp (C = 1): a part has been sent before its du comes back."""
    B, C, H, _ = dp_BCHT.shape
    for part in split.parts(H, B * split.length * u_BhL.element_size()):
        u_BwL = u_BhL[:, part.place]
        dp_BCwL = split.to_channels(dp_BCHT, part)
        du_BwL = None
        if du_BHT is not None:
            fits = C == 1 and dp_BCwL.dtype == du_BHT.dtype
            du_BwL = dp_BCwL[:, 0] if fits else du_BHT.new_empty(u_BwL.shape)
        if u_BwL.shape[1]:
            convolve_backward(u_BwL, part.own, dp_BCwL, du_BwL)
        if du_BHT is not None and du_BwL is not None:
            split.to_time(du_BwL, part, du_BHT)
    if du_BHT is not None and valid_BT is not None:
        du_BHT.masked_fill_(~valid_BT.unsqueeze(1), 0)
