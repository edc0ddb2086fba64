"""A ring of the last inputs, (rows, B, H): sample t lies in row t mod rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.lean.long_conv import long_conv

# inputs that are laid out for transforms at a time
GROUP_NUMBERS = 2**23


def read(ring: Tensor, begin: int, end: int) -> Tensor:
    """Samples begin..end-1, at most as many as the ring has rows; a view where they do not wrap."""
    start = begin % ring.shape[0]
    behind = start + end - begin - ring.shape[0]
    return ring[start : start + end - begin] if behind <= 0 else torch.cat([ring[start:], ring[:behind]])


def write(ring: Tensor, begin: int, u: Tensor) -> None:
    """Put samples u (T, B, H) at times begin, begin + 1, ..; of more than the ring holds only the last ones."""
    u, begin = u[-ring.shape[0] :], begin + max(0, u.shape[0] - ring.shape[0])
    start = begin % ring.shape[0]
    fits = min(u.shape[0], ring.shape[0] - start)
    ring[start : start + fits] = u[:fits]
    ring[: u.shape[0] - fits] = u[fits:]


def convolve(ring: Tensor, t: int, u: Tensor, K: int, taps_of: Callable[[slice], Tensor], y: Tensor) -> None:
    """Outputs y (T, B, C, H) for u (T, B, H) at times t.., by transforms of history and block; the ring is only read.

    taps_of(features) makes the taps (C, features, K) of a few features: only those are transformed together.
    """
    T, B, _, H = y.shape
    chunk = max(K, 2**16)  # longer blocks bring their own history
    group = max(1, GROUP_NUMBERS // (B * (K + min(T, chunk))))
    for features in (slice(h, min(h + group, H)) for h in range(0, H, group)):
        taps = taps_of(features)
        for start in range(0, T, chunk):
            new = u[start : start + chunk, :, features]
            history = min(t + start, K - 1)
            inside = min(start, history)  # the rest of the history came before the block
            past = read(ring[..., features], t + start - history, t + start - inside)
            whole = torch.cat([past, u[start - inside : start, :, features], new]).permute(1, 2, 0)
            y[start : start + chunk, :, :, features] = long_conv(whole, taps)[..., history:].permute(3, 0, 1, 2)
