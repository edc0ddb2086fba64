"""How much of a sequence may be in memory at once: the tiles of the out-of-core run, derived from the shapes.

C outputs per channel, D = C * H pre-activation channels, O outputs of the map before GLU, K taps, L samples
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import ArgumentError, describe
from lowtide.functional import stream_block_length, stream_working_numbers
from lowtide.measure.units import format_bytes
from lowtide.sgconv_form import LayerForm

# what allocators keep beyond what is asked of them, and the arrays that Python itself needs
OVERHEAD = 1.15
FIXED_BYTES = 24 * 2**20
MAX_TILE = 64  # channels: one block of columns of the native cascade on the widest registers
MAX_POSITIONS = 65536


@dataclass(frozen=True)
class Tiles:
    """Channels and samples at a time in the convolution, and positions at a time in the map."""

    channels: int
    block: int
    positions: int


def choose_tiles(
    form: LayerForm, H: int, O: int, L: int, itemsize: int, memory_bytes: int, *, per_position: int = 0
) -> Tiles:
    """The largest tiles whose arrays fit into `memory_bytes`.

    per_position: numbers of a position that a model holds beside the layer's own.

    Raises:
        ArgumentError: not even one channel fits.
    """
    block = stream_block_length(form.kernel, L)
    usable = int((memory_bytes - FIXED_BYTES) / OVERHEAD)
    one = convolution_bytes(form, H, block, itemsize, 1)
    if one > usable:
        least = int(one * OVERHEAD) + FIXED_BYTES
        expected = f"at least {format_bytes(least)} (one channel of {form.kernel.taps} taps)"
        raise ArgumentError(describe(expected=expected, got=format_bytes(memory_bytes), where="memory"))
    channels = 1
    while channels < min(H, MAX_TILE) and convolution_bytes(form, H, block, itemsize, channels + 1) <= usable:
        channels += 1
    positions = max(1, min(MAX_POSITIONS, L, usable // (map_bytes(form, H, O, itemsize) + per_position * itemsize)))
    return Tiles(channels, block, positions)


def convolution_bytes(form: LayerForm, H: int, block: int, itemsize: int, channels: int) -> int:
    """State, coefficients and one block of `channels` channels."""
    C = form.channels
    numbers = stream_working_numbers(form.kernel, C, block) + (2 + 2 * C) * block
    whole_rows = 0 if form.transposed else 2 * block * H  # rows of a time-major file are read whole
    return (numbers * channels + whole_rows) * itemsize


def map_bytes(form: LayerForm, H: int, O: int, itemsize: int) -> int:
    """One position: pre-activation twice, activation and norm, map, gate, and the output twice."""
    D = form.channels * H
    return (4 * D + 2 * O + 3 * H) * itemsize


def itemsize_of(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
