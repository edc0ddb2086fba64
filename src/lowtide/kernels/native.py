"""The passes in C++ (native_src/), each one read and one write of memory, for maps of every floating dtype on the CPU.

Arithmetic is float32 (float64 for float64 maps) in vector registers; sums leave float32 after a few hundred numbers.
Sums are cut into parts that do not depend on the number of threads and added up in order: neither does the result.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowtide.kernels.build import load_library
from lowtide.kernels.interface import Activation
from lowtide.kernels.tensor_calls import accumulation_dtype

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
LEVELS = ("DEFAULT", "AVX2", "AVX512")  # as torch.backends.cpu.get_cpu_capability() names them
_NO_MAP = (0, 0, 0, 0, 0)
_PLANES, _ROWS, _PLANES_TO_ROWS = range(3)


class _Map(ctypes.Structure):
    """`Map` of native_src/task.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride_n", ctypes.c_int64),
        ("stride_c", ctypes.c_int64),
        ("stride_s", ctypes.c_int64),
    )


class _Task(ctypes.Structure):
    """`Task` of native_src/task.h."""

    _fields_ = (
        ("images", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("form", ctypes.c_int64),
        ("relu", ctypes.c_int64),
        ("x", _Map),
        ("grad", _Map),
        ("out", _Map),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("sums_x", ctypes.c_void_p),
    )


class NativeKernels:
    """Provider "native". `level` is the instruction set in use, at most the one that torch uses (ATEN_CPU_CAPABILITY).

    Raises:
        BuildError: the passes cannot be compiled here.
    """

    name = "native"

    def __init__(self, level: str | None = None) -> None:
        self._library = load_library()
        self._library.lowtide_task_bytes.restype = ctypes.c_int64
        self._library.lowtide_highest_level.restype = ctypes.c_int64
        assert self._library.lowtide_task_bytes() == ctypes.sizeof(_Task), (
            "native.py and task.h describe different tasks"
        )
        capability = level or torch.backends.cpu.get_cpu_capability()
        wanted = next((i for i, name in enumerate(LEVELS) if capability.startswith(name)), 0)
        self._level = ctypes.c_int64(min(wanted, self._library.lowtide_highest_level()))
        self.level = LEVELS[self._level.value]

    def supports(self, x: Tensor) -> bool:
        # a subclass (a fake tensor, for one) may have no memory behind it
        plain = type(x) is Tensor or type(x) is torch.nn.Parameter
        return plain and x.device.type == "cpu" and x.dtype in _DTYPES and x.layout == torch.strided and not x.is_neg()

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = torch.empty(2, x.shape[1], dtype=accumulation_dtype(x))
        task = _Task(
            *x.shape, _form(x), 0, _map(x, x), _NO_MAP, _NO_MAP,
            None, None, None, mean.data_ptr(), variance.data_ptr(),
        )  # fmt: skip
        self._library.lowtide_batch_stats(ctypes.byref(task), self._level)
        return mean, variance

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        form = _PLANES_TO_ROWS if _is_planes(x) and not _is_planes(out) else _form(x, out)
        task = _Task(
            *x.shape, form, act == "relu", _map(x, x), _NO_MAP, _map(out, x),
            _vector(scale, x), _vector(shift, x), None, None, None,
        )  # fmt: skip
        self._library.lowtide_scale_shift_act(ctypes.byref(task), self._level)

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums, sums_x = torch.zeros(2, x.shape[1], dtype=accumulation_dtype(x))
        task = _Task(
            *x.shape, _form(x, grad), act == "relu", _map(x, x), _map(grad, x), _NO_MAP,
            _vector(scale, x), _vector(shift, x), _vector(mean, x), sums.data_ptr(), sums_x.data_ptr(),
        )  # fmt: skip
        self._library.lowtide_act_backward_sums(ctypes.byref(task), self._level)
        return sums, sums_x

    def act_backward_accumulate(
        self,
        grad_z: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        act: Activation,
        mean: Tensor,
        total: Tensor,
        sums: Tensor,
        sums_x: Tensor,
    ) -> None:
        task = _Task(
            *x.shape, _form(x, grad_z, total), act == "relu", _map(x, x), _map(grad_z, x), _map(total, x),
            _vector(scale, x), _vector(shift, x), _vector(mean, x), _vector(sums, x), _vector(sums_x, x),
        )  # fmt: skip
        self._library.lowtide_act_backward_accumulate(ctypes.byref(task), self._level)

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        task = _Task(
            *x.shape, _form(x, grad), 0, _map(x, x), _map(grad, x), _NO_MAP,
            None if scale is None else _vector(scale, x), _vector(slope, x), _vector(offset, x), None, None,
        )  # fmt: skip
        self._library.lowtide_affine_add(ctypes.byref(task), self._level)


def _is_planes(x: Tensor) -> bool:
    """Whether the positions of a channel are neighbours in memory."""
    return x.stride(2) == 1 or x.shape[2] <= 1


def _is_rows(x: Tensor) -> bool:
    """Whether the channels of a position are neighbours in memory."""
    return x.stride(1) == 1 or x.shape[1] <= 1


def _form(*maps: Tensor) -> int:
    """The form that all maps of one pass share; where both are possible, the one with the longer runs."""
    _, n_channels, n_positions = maps[0].shape
    forms = [form for form, test in ((_PLANES, _is_planes), (_ROWS, _is_rows)) if all(map(test, maps))]
    assert forms, (
        f"one pass over maps with strides {', '.join(str(x.stride()) for x in maps)}: neither all planes nor all rows"
    )
    return forms[0] if len(forms) == 1 or n_positions >= n_channels else _ROWS


def _map(tensor: Tensor, x: Tensor) -> tuple[int, int, int, int, int]:
    """`tensor`, which must have the shape of `x`, as a `_Map`."""
    assert tensor.shape == x.shape, f"maps of shapes {tuple(tensor.shape)} and {tuple(x.shape)} in one pass"
    assert tensor.device == x.device
    assert (tensor.dtype == torch.float64) == (x.dtype == torch.float64), f"{tensor.dtype} beside {x.dtype}"
    stride_n, stride_c, stride_s = tensor.stride()
    return tensor.data_ptr(), _DTYPES[tensor.dtype], stride_n, stride_c, stride_s


def _vector(vector: Tensor, x: Tensor) -> int:
    """The address of a vector (C,) in the accumulation dtype of `x`."""
    assert vector.shape == (x.shape[1],), f"a vector of shape {tuple(vector.shape)} beside {x.shape[1]} channels"
    assert vector.dtype == accumulation_dtype(x), f"a vector of {vector.dtype} beside a map of {x.dtype}"
    assert vector.is_contiguous()
    assert vector.device == x.device
    return vector.data_ptr()
