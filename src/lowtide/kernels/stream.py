"""The streaming cascade in C++ (native_src/stream.cpp): one call for a block of samples and all levels of the kernel.

Columns (channels of one row of the batch) are shared out over torch's threads and do not meet, so the result does not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.kernels.native import NativeKernels

TILE = 16  # the most samples that native_src/cascade.h takes through a level at once


class _Stream(ctypes.Structure):
    """`Stream` of native_src/stream.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "batch", "outputs", "features", "position")),
        *((name, ctypes.c_int64) for name in ("ring_rows", "widest", "levels", "tile", "ramp", "is_double")),
        *((name, ctypes.c_void_p) for name in ("u", "y", "ring", "lines", "offsets", "level_ends", "coefficients")),
    )


class StreamPasses:
    """The cascade in the library of a native provider, on the provider's instruction set."""

    def __init__(self, provider: NativeKernels) -> None:
        self._library, self._level = provider._library, provider._level
        self._library.lowtide_stream_bytes.restype = ctypes.c_int64
        assert self._library.lowtide_stream_bytes() == ctypes.sizeof(_Stream), (
            "kernels/stream.py and stream.cpp describe different tasks"
        )

    def cascade(
        self,
        u: Tensor,
        y: Tensor,
        ring: Tensor,
        lines: Tensor,
        position: int,
        *,
        offsets: Tensor,
        level_ends: Tensor,
        coefficients: Tensor,
        widest: int,
        slack: int,
    ) -> None:
        """Stream u (T, B, H) into y (T, B, C, H); ring and lines are changed in place.

        Args:
            u, y, ring (rows, B, H), lines (slots, B, C, H), coefficients (cells, 1 or 2, C, H): contiguous, of one
                dtype, float32 or float64.
            position: the time of u[0].
            offsets: (cells,) int64, the first tap of each cell, cells from the widest down.
            level_ends: (levels,) int64, how many cells are at least as wide as the level.
            widest: width of the cells of the first level.
            slack: rows of the ring beyond the oldest sample that a cell reads, and one.
        """
        T, B, C, H = y.shape
        for x in (u, y, ring, lines, offsets, level_ends, coefficients):
            assert x.is_contiguous()
            assert x.device.type == "cpu"
        assert (u.shape, ring.shape[1:], lines.shape[1:]) == ((T, B, H), (B, H), (B, C, H))
        assert u.dtype == y.dtype == ring.dtype == lines.dtype == coefficients.dtype
        task = _Stream(
            T, B, C, H, position,
            ring.shape[0], widest, level_ends.shape[0], min(TILE, slack),
            coefficients.shape[1] == 2, u.dtype == torch.float64,
            u.data_ptr(), y.data_ptr(), ring.data_ptr(), lines.data_ptr(),
            offsets.data_ptr(), level_ends.data_ptr(), coefficients.data_ptr(),
        )  # fmt: skip
        self._library.lowtide_stream_cascade(ctypes.byref(task), self._level)


def select(u: Tensor) -> StreamPasses | None:
    """The native cascade, if it can run on tensors like `u` and LOWTIDE_KERNELS asks for no other provider."""
    provider = kernels.select(u)
    return _passes_of(provider) if isinstance(provider, NativeKernels) else None


@functools.cache
def _passes_of(provider: NativeKernels) -> StreamPasses:
    return StreamPasses(provider)
