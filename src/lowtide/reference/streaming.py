"""Streaming, written to be read: a ring of the last inputs and a dot product with the whole kernel for every sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.reference.sgconv_kernel import sgconv_kernel
from lowtide.sgconv_form import KernelForm
from lowtide.stream_state import State


@dataclass(frozen=True)
class StreamFilter:
    """The kernel (C, H, K) of a stream; output t belongs to input t - delay."""

    kernel: Tensor
    delay: int = 0


def prepare_taps(kernel: Tensor, delay: int = 0) -> StreamFilter:
    """A filter of any taps (C, H, K): y[t - delay] = sum_j kernel[j] u[t - j]."""
    return StreamFilter(kernel, delay)


def prepare(
    pieces: Sequence[Tensor],
    multiplier: Tensor,
    decay: Tensor | None,
    norm: Tensor | None,
    skip: Tensor | None,
    *,
    form: KernelForm,
    bidirectional: bool = False,
) -> StreamFilter:
    """The filter of an SGConv kernel and its skip term; arguments as `sgconv_kernel`, skip (C, H).

    Two-sided kernels (pieces (2C, H, d), the reverse ones behind) look ahead by all their taps: delay = taps.
    """
    kernel = sgconv_kernel(pieces, multiplier, decay, norm, form, form.taps)
    delay = 0
    if bidirectional:
        forward, reverse = kernel.chunk(2)
        # reverse tap j has lag -(j+1): behind a delay of K samples it is lag K - 1 - j
        kernel, delay = torch.cat([reverse.flip(-1), forward], dim=-1), form.taps
    if skip is not None:
        kernel[..., delay] += skip
    return StreamFilter(kernel, delay)


def initial_state(filter: StreamFilter, batch_size: int) -> State:
    """Nothing heard yet: position (), ring (K, B, H)."""
    _, H, K = filter.kernel.shape
    return {
        "position": torch.zeros((), dtype=torch.int64, device=filter.kernel.device),
        "ring": filter.kernel.new_zeros(K, batch_size, H),
    }


def step(u: Tensor, state: State, filter: StreamFilter) -> Tensor:
    """u (B, H) -> y (B, C, H) in u's dtype; the state is changed in place."""
    ring, t = state["ring"], int(state["position"])
    K = ring.shape[0]
    ring[t % K] = u
    newest_first = (t - torch.arange(K, device=u.device)) % K
    y = torch.einsum("kbh,chk->bch", ring[newest_first], filter.kernel)
    state["position"] += 1
    return y.to(u.dtype)


def block(u: Tensor, state: State, filter: StreamFilter) -> Tensor:
    """u (B, H, T), any T >= 0 -> y (B, C, H, T)."""
    outputs = [step(u[..., t], state, filter) for t in range(u.shape[-1])]
    if outputs:
        return torch.stack(outputs, dim=-1)
    return u.new_zeros(u.shape[0], filter.kernel.shape[0], u.shape[1], 0)
