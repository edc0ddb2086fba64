"""The passes with a pool in C++ (native_src/pool.h) for maps in rows on the CPU; those in planes go by tensor calls.

`fuses_pool` tells them apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.kernels.native_tasks import NO_MAP, Map, address, as_map, grid_of, is_rows
from lowtide.kernels.pools import average_pooled, max_pooled
from lowtide.kernels.tensor_pools import TensorPools


class PoolTask(ctypes.Structure):
    """`PoolTask` of native_src/task.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "channels")),
        *((name, ctypes.c_int64 * 3) for name in ("grid", "pooled")),
        *((name, Map) for name in ("x", "grad", "out")),
        *((name, ctypes.c_void_p) for name in ("choice", "scale", "shift", "mean", "sums", "sums_x")),
    )


class NativePools(TensorPools):
    """Part of the provider "native"."""

    _library: ctypes.CDLL
    _level: ctypes.c_int64

    def fuses_pool(self, x: Tensor) -> bool:
        return is_rows(x)

    def norm_act_max_pool(self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor) -> None:
        if not is_rows(x):
            return super().norm_act_max_pool(x, scale, shift, spatial, out)
        task = _task(x, spatial, max_pooled(spatial), out=out, vectors=(scale, shift))
        self._library.lowtide_pool_forward(ctypes.byref(task), ctypes.c_int64(1), self._level)

    def norm_act_max_pool_sums(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        choice: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if not is_rows(x):
            return super().norm_act_max_pool_sums(grad, x, scale, shift, mean, spatial, choice)
        sums, sums_x = torch.zeros(2, x.shape[1], dtype=scale.dtype)
        task = _task(
            x, spatial, max_pooled(spatial), grad=grad, choice=choice, vectors=(scale, shift, mean), sums=(sums, sums_x)
        )
        self._library.lowtide_max_pool_sums(ctypes.byref(task), self._level)
        return sums, sums_x

    def norm_act_max_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        choice: Tensor,
        scale: Tensor,
        slope: Tensor,
        offset: Tensor,
        spatial: Sequence[int],
        out: Tensor,
    ) -> None:
        if not is_rows(x):
            return super().norm_act_max_pool_backward(grad, x, choice, scale, slope, offset, spatial, out)
        task = _task(
            x, spatial, max_pooled(spatial), grad=grad, choice=choice, vectors=(scale, slope, offset), of_x=out
        )
        self._library.lowtide_max_pool_backward(ctypes.byref(task), self._level)

    def norm_act_average_pool(
        self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        if not is_rows(x):
            return super().norm_act_average_pool(x, scale, shift, spatial, out)
        task = _task(x, spatial, average_pooled(spatial), out=out, vectors=(scale, shift))
        self._library.lowtide_pool_forward(ctypes.byref(task), ctypes.c_int64(0), self._level)

    def norm_act_average_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        total: Tensor | None,
        sums: Tensor,
        sums_x: Tensor,
    ) -> None:
        if not is_rows(x):
            return super().norm_act_average_pool_backward(grad, x, scale, shift, mean, spatial, total, sums, sums_x)
        vectors = (scale, shift, mean)
        task = _task(x, spatial, average_pooled(spatial), grad=grad, vectors=vectors, sums=(sums, sums_x), of_x=total)
        self._library.lowtide_average_pool_backward(ctypes.byref(task), self._level)


def _task(
    x: Tensor,
    spatial: Sequence[int],
    pooled: Sequence[int],
    *,
    vectors: tuple[Tensor, ...],
    grad: Tensor | None = None,
    out: Tensor | None = None,
    of_x: Tensor | None = None,
    choice: Tensor | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> PoolTask:
    """`grad` and `out` have the pool's positions, `of_x` those of x."""
    n, c, s = x.shape
    s2 = torch.Size(pooled).numel()
    assert s == torch.Size(spatial).numel()
    small = torch.empty((), dtype=x.dtype).expand(n, c, s2)  # a shape to compare with
    assert all(is_rows(m) for m in (x, grad, out, of_x) if m is not None)
    if choice is not None:
        assert choice.dtype == torch.int32
        assert choice.shape == small.shape
        assert choice.transpose(1, 2).is_contiguous()
    written = NO_MAP if of_x is None else as_map(of_x, x)
    addresses = [address(v, x) for v in vectors] + [None] * (3 - len(vectors))
    return PoolTask(
        n, c, grid_of(spatial), grid_of(pooled), as_map(x, x), NO_MAP if grad is None else as_map(grad, small),
        written if out is None else as_map(out, small), None if choice is None else choice.data_ptr(),
        *addresses, *(None, None) if sums is None else (address(v, x) for v in sums),
    )  # fmt: skip
