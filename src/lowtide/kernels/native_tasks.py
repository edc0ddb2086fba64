"""The structs that native_src/task.h describes, and how tensors get into them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.kernels.tensor_calls import accumulation_dtype

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
NO_MAP = (0, 0, 0, 0, 0)
PLANES, ROWS, PLANES_TO_ROWS = range(3)


class Map(ctypes.Structure):
    """`Map` of native_src/task.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride_n", ctypes.c_int64),
        ("stride_c", ctypes.c_int64),
        ("stride_s", ctypes.c_int64),
    )


class Task(ctypes.Structure):
    """`Task` of native_src/task.h."""

    _fields_ = (
        ("images", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("form", ctypes.c_int64),
        ("relu", ctypes.c_int64),
        ("x", Map),
        ("grad", Map),
        ("out", Map),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("sums_x", ctypes.c_void_p),
    )


class MixTask(ctypes.Structure):
    """`MixTask` of native_src/task.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("images", "positions", "inputs", "outputs")),
        *((name, ctypes.c_int64 * 3) for name in ("grid", "reach")),
        *((name, Map) for name in ("x", "y", "grad", "total")),
        ("assign", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scale", "shift", "mean", "weight", "y_scale", "y_slope", "y_offset")),
        *((name, ctypes.c_void_p) for name in ("sums", "sums_x", "dweight")),
    )


def grid_of(spatial: Sequence[int]) -> tuple[int, int, int]:
    """Spatial sizes as a grid of three axes, the missing ones in front."""
    depth, height, width = (*[1] * (3 - len(spatial)), *spatial)
    return depth, height, width


def is_planes(x: Tensor) -> bool:
    """Whether the positions of a channel are neighbours in memory."""
    return x.stride(2) == 1 or x.shape[2] <= 1 or x.numel() == 0


def is_rows(x: Tensor) -> bool:
    """Whether the channels of a position are neighbours in memory."""
    return x.stride(1) == 1 or x.shape[1] <= 1 or x.numel() == 0


def form_of(*maps: Tensor) -> int:
    """The form that all maps of one pass share; where both are possible, the one with the longer runs."""
    _, n_channels, n_positions = maps[0].shape
    forms = [form for form, test in ((PLANES, is_planes), (ROWS, is_rows)) if all(map(test, maps))]
    assert forms, (
        f"one pass over maps with strides {', '.join(str(x.stride()) for x in maps)}: neither all planes nor all rows"
    )
    return forms[0] if len(forms) == 1 or n_positions >= n_channels else ROWS


def as_map(tensor: Tensor, x: Tensor, n_channels: int | None = None) -> tuple[int, int, int, int, int]:
    """`tensor`, which must have the shape of `x` (or other channels), as a `Map`."""
    n_images, c, n_positions = x.shape
    expected = (n_images, c if n_channels is None else n_channels, n_positions)
    assert tensor.shape == expected, f"a map of shape {tuple(tensor.shape)} where {expected} belongs"
    assert tensor.device == x.device
    assert (tensor.dtype == torch.float64) == (x.dtype == torch.float64), f"{tensor.dtype} beside {x.dtype}"
    stride_n, stride_c, stride_s = tensor.stride()
    return tensor.data_ptr(), DTYPES[tensor.dtype], stride_n, stride_c, stride_s


def address(vector: Tensor, x: Tensor, *shape: int) -> int:
    """The address of a vector (C,), or of numbers of another shape, in the accumulation dtype of `x`."""
    expected = shape or (x.shape[1],)
    assert vector.shape == expected, f"shape {tuple(vector.shape)} where {expected} belongs"
    assert vector.dtype == accumulation_dtype(x), f"{vector.dtype} beside a map of {x.dtype}"
    assert vector.is_contiguous()
    assert vector.device == x.device
    return vector.data_ptr()
