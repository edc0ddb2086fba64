"""Streaming at the same small cost for every sample, however long the kernel: the lean twin of `reference.streaming`.

Scale-decayed kernels are piecewise linear and stream as cells (`stream_cascade`): about 2 kernel_dim n_scales
multiply-adds per channel and sample. Kernels with a power decay, and taps from anywhere, stream in partitions
(`stream_partitions`): cheap on average, with one dear sample at the end of each partition.

A state remembers which weights its intermediate results were made with. If the filter has others since, they are made
anew from the ring of inputs first: the outputs are always those of the present weights over the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.kernels import stream as native
from lowtide.lean.sgconv_kernel import sgconv_kernel
from lowtide.lean.stream_cascade import CellFilter, transform_pays
from lowtide.lean.stream_cells import cell_plan, coefficients, weighted_numbers
from lowtide.lean.stream_partitions import PartitionFilter, partition_filter
from lowtide.sgconv_form import KernelForm
from lowtide.stream_state import State

_FIX = "make it with initial_state of the same weights, batch size, dtype and device"
StreamFilter = CellFilter | PartitionFilter


def prepare_taps(kernel: Tensor, delay: int = 0) -> StreamFilter:
    """A filter of any taps (C, H, K): y[t - delay] = sum_j kernel[j] u[t - j]; in partitions."""
    kernel = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    return partition_filter(kernel, delay, _fingerprint(kernel))


@torch.no_grad()
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
    The arithmetic is in float32, or float64 for float64 pieces; the numbers are weighted in float64 first.
    """
    if form.decay != "scale":
        kernel, delay = sgconv_kernel(pieces, multiplier, decay, norm, form, form.taps), 0
        if bidirectional:
            forward, reverse = kernel.chunk(2)
            # reverse tap j has lag -(j+1): behind a delay of K samples it is lag K - 1 - j
            kernel, delay = torch.cat([reverse.flip(-1), forward], dim=-1), form.taps
        if skip is not None:
            kernel[..., delay] += skip
        return prepare_taps(kernel, delay)
    plan = cell_plan(form, pieces[0].shape[0] // (2 if bidirectional else 1), bidirectional)
    v = weighted_numbers(pieces, multiplier, norm, skip, bidirectional)
    dtype = torch.promote_types(pieces[0].dtype, torch.float32)
    numbers = coefficients(plan, v).to(dtype).contiguous()
    offset = plan.offset.to(numbers.device)
    return CellFilter(plan, numbers, _fingerprint(numbers), offset, torch.tensor(plan.level_ends))


def initial_state(filter: StreamFilter, batch_size: int) -> State:
    """Nothing heard yet.

    Cells: ring (K - 1 + slack, B, H) and lines (2 R - 2, B, C, H), together at most 1.05 K numbers per input channel.
    Partitions: ring and pending results, at most 1.5 K + 192.
    """
    state: State = {
        name: torch.zeros(shape, dtype=filter.dtype, device=filter.device)
        for name, shape in filter.state_shapes(batch_size).items()
    }
    state["position"] = torch.zeros((), dtype=torch.int64, device=filter.device)
    state["weights"] = torch.full_like(state["position"], filter.fingerprint)
    return state


def step(u: Tensor, state: State, filter: StreamFilter) -> Tensor:
    """u (B, H) -> y (B, C, H) in u's dtype; the state is changed in place."""
    return block_rows(u.unsqueeze(0), state, filter).squeeze(0)


def block(u: Tensor, state: State, filter: StreamFilter) -> Tensor:
    """u (B, H, T), any T >= 0 -> y (B, C, H, T) in u's dtype; the state is changed in place."""
    return block_rows(u.permute(2, 0, 1), state, filter).permute(1, 2, 3, 0)


@torch.no_grad()
def block_rows(u: Tensor, state: State, filter: StreamFilter) -> Tensor:
    """`block` with time in front, as the state has it: u (T, B, H) -> y (T, B, C, H)."""
    _check(state, u, filter)
    if int(state["weights"]) != filter.fingerprint:
        filter.refresh(state)
    if u.shape[0] == 0:
        return u.new_empty(*u.shape[:2], filter.channels, filter.features)
    if u.dtype is filter.dtype:
        return filter.block(u, state)
    return filter.block(u.to(filter.dtype), state).to(u.dtype)


def _check(state: State, u: Tensor, filter: StreamFilter) -> None:
    """A state of other shapes would be read and written beyond its end."""
    _, B, H = u.shape
    if filter.features != H:
        _refuse(f"a state for {filter.features} channels", f"{H} channels")
    device, dtype = u.device, filter.dtype
    for name, shape in filter.state_shapes(B).items():
        leaf = state.get(name)
        if leaf is None or leaf.shape != shape:
            found = {name: tuple(leaf.shape) for name, leaf in state.items() if leaf.dim()}
            _refuse(f"a state {filter.state_shapes(B)} for {B} rows", f"{found}")
        if leaf.dtype is not dtype or leaf.device != device or not leaf.is_contiguous():
            got = f"{name} of {leaf.dtype} on {leaf.device}, strides {leaf.stride()}"
            _refuse(f"a contiguous state of {dtype} on {device}", got)
    position = state["position"]
    if position.dtype is not torch.int64 or position.device != device:
        _refuse(f"a position of torch.int64 on {device}", f"{position.dtype} on {position.device}")


def _refuse(expected: str, got: str) -> NoReturn:
    raise ArgumentError(describe(expected=expected, got=got, where="streaming", fix=_FIX))


def _fingerprint(numbers: Tensor) -> int:
    """Tells weights from other weights, in this process and the next: a sum of their bits in which places count."""
    bits = numbers.double().contiguous().view(torch.int64).flatten()
    places = torch.arange(bits.numel(), device=bits.device) * 2 + 1
    return int((bits * places).sum())


def block_length(form: KernelForm, samples: int) -> int:
    """How many of `samples` to stream at a time when none is waited for: transforms want as many as there are taps."""
    on_cells = form.decay == "scale" and native.select(torch.empty(0)) is not None
    return min(samples, 8192 if on_cells else max(8192, form.taps))


def working_numbers(form: KernelForm, channels: int, block: int) -> int:
    """Upper bound of the numbers that streaming `block` samples holds per input channel, state and filter included.

    channels: outputs per input channel, C.
    """
    K, C = form.taps, channels
    own = (2 + 3 * C) * block  # inputs and outputs, in the order of the caller and in time
    # of the transforms: taps, history and block, outputs, and the rows of a tile
    transform = 3 * C * K + (2 + 2 * C) * (K + block)
    if form.decay == "scale":
        plan = cell_plan(form, C)
        # coefficients, and what they are made from in float64
        cells = plan.state_numbers(C) + 14 * C * plan.level_ends[-1]
        on_native = native.select(torch.empty(0)) is not None
        pays = any(transform_pays(plan, block, history, native=on_native) for history in (0, K - 1))
        return own + cells + (transform if pays else 0)
    # taps twice while they are made; state; spectra, and the padded taps that they are the spectra of
    return own + transform + 2 * C * K + (5 + C) * K // 4 + 8 * C * K
