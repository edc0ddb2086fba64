"""A ring of the last inputs, (rows, B, H): sample t lies in row t mod rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.lean.long_conv import long_conv


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


def convolve(ring: Tensor, t: int, u: Tensor, kernel: Tensor) -> Tensor:
    """Outputs (T, B, C, H) for u (T, B, H) at times t.., by transforms of history and block; the ring is only read."""
    T, K = u.shape[0], kernel.shape[-1]
    chunk = max(K, 2**16)  # bounds the transforms: longer blocks bring their own history
    outputs: list[Tensor] = []
    for start in range(0, T, chunk):
        new = u[start : start + chunk]
        history = min(t + start, K - 1)
        inside = min(start, history)  # the rest of the history came before the block
        past = read(ring, t + start - history, t + start - inside)
        whole = torch.cat([past, u[start - inside : start], new]).permute(1, 2, 0)
        outputs.append(long_conv(whole, kernel)[..., history:].permute(3, 0, 1, 2))
    return torch.cat(outputs)
