"""The streaming cascade in C++ (native_src/stream.cpp): one call for a block of samples and all levels of the kernel.

Columns (channels of one row of the batch) are shared out over torch's threads and do not meet, so the result does not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.kernels import VARIABLE, Kernels
from lowtide.kernels.native import NativeKernels

TILE = 16  # the most samples that native_src/cascade.h takes through a level at once


class _Stream(ctypes.Structure):
    """`Stream` of native_src/stream.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "batch", "outputs", "features")),
        *((name, ctypes.c_int64) for name in ("ring_rows", "widest", "levels", "tile", "ramp", "is_double")),
        *((name, ctypes.c_void_p) for name in ("position", "u", "y", "ring", "lines")),
        *((name, ctypes.c_void_p) for name in ("offsets", "level_ends", "coefficients")),
    )


class Cascade:
    """The native cascade with the numbers of one kernel; what a sample needs besides is checked and laid down per call.

    Args:
        provider: whose library and instruction set to use.
        offsets: (cells,) int64, the first tap of each cell, cells from the widest down.
        level_ends: (levels,) int64, how many cells are at least as wide as the level.
        coefficients: (cells, 1 or 2, C, H), float32 or float64.
        widest: width of the cells of the first level.
        ring_rows: rows of the ring.
        slack: how many of them lie beyond the oldest sample that a cell reads, and one.
    """

    def __init__(
        self,
        provider: NativeKernels,
        *,
        offsets: Tensor,
        level_ends: Tensor,
        coefficients: Tensor,
        widest: int,
        ring_rows: int,
        slack: int,
    ) -> None:
        self._run, self._level = provider._library.lowtide_stream_cascade, provider._level
        provider._library.lowtide_stream_bytes.restype = ctypes.c_int64
        assert provider._library.lowtide_stream_bytes() == ctypes.sizeof(_Stream), (
            "kernels/stream.py and stream.cpp describe different tasks"
        )
        self._numbers = (offsets, level_ends, coefficients)  # the task has their addresses
        for x in self._numbers:
            assert x.is_contiguous()
            assert x.device.type == "cpu"
        _, parts, self._outputs, self._features = coefficients.shape
        self._dtype = coefficients.dtype
        self._task = _Stream(
            0, 0, self._outputs, self._features,
            ring_rows, widest, level_ends.shape[0], min(TILE, slack), parts == 2, self._dtype == torch.float64,
            None, None, None, None, None,
            offsets.data_ptr(), level_ends.data_ptr(), coefficients.data_ptr(),
        )  # fmt: skip

    def __call__(self, u: Tensor, ring: Tensor, lines: Tensor, position: Tensor) -> Tensor:
        """Stream u (T, B, H) -> y (T, B, C, H); ring, lines and position are changed in place.

        Args:
            u: in the dtype of the coefficients, on the CPU.
            ring: (ring_rows, B, H), contiguous, of that dtype.
            lines: (slots, B, C, H), contiguous, of that dtype.
            position: (), int64, the time of u[0]; afterwards that of the sample behind the last.
        """
        T, B, H = u.shape
        u = u.contiguous()
        assert u.dtype is ring.dtype is lines.dtype is self._dtype
        assert position.dtype is torch.int64
        assert u.is_cpu
        assert position.is_cpu
        task = _Stream.from_buffer_copy(self._task)  # calls from several threads have one each
        assert (H, ring.shape) == (self._features, (task.ring_rows, B, H))
        y = u.new_empty((T, B, self._outputs, H))
        task.samples, task.batch = T, B
        task.position, task.u, task.y = position.data_ptr(), u.data_ptr(), y.data_ptr()
        task.ring, task.lines = ring.data_ptr(), lines.data_ptr()
        self._run(ctypes.byref(task), self._level)
        return y


def select(u: Tensor) -> NativeKernels | None:
    """Whose cascade runs on tensors like `u`: None where LOWTIDE_KERNELS asks for another provider or none can run."""
    if type(u) is Tensor and u.is_cpu and not u.is_neg():
        return _select(os.environ.get(VARIABLE, ""), u.dtype)
    return _native(kernels.select(u))


@functools.cache
def _select(_asked: str, dtype: torch.dtype) -> NativeKernels | None:
    """For plain tensors; a stream asks for every sample, so what LOWTIDE_KERNELS came to is remembered."""
    return _native(kernels.select(torch.empty(0, dtype=dtype)))


def _native(provider: Kernels) -> NativeKernels | None:
    return provider if isinstance(provider, NativeKernels) else None
