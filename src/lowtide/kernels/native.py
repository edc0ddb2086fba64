"""The passes in C++ (native_src/), each one read and one write of memory, for maps of every floating dtype on the CPU.

Arithmetic is float32 (float64 for float64 maps) in vector registers; sums leave float32 after a few hundred numbers.
The sums of the elementwise passes are cut into parts that do not depend on the number of threads and added up in order:
neither does the result. The backward of the passes with a convolution sums per thread: there it does, within rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.kernels.build import load_library
from lowtide.kernels.interface import Activation, Normed
from lowtide.kernels.native_pools import NativePools, PoolTask
from lowtide.kernels.native_tasks import (
    DTYPES,
    NO_MAP,
    PLANES_TO_ROWS,
    MixTask,
    Task,
    address,
    as_map,
    form_of,
    grid_of,
    is_planes,
    is_rows,
)
from lowtide.kernels.tensor_calls import accumulation_dtype

LEVELS = ("DEFAULT", "AVX2", "AVX512")  # as torch.backends.cpu.get_cpu_capability() names them


class NativeKernels(NativePools):
    """Provider "native". `level` is the instruction set in use, at most the one that torch uses (ATEN_CPU_CAPABILITY).

    Raises:
        BuildError: the passes cannot be compiled here.
    """

    name = "native"

    def __init__(self, level: str | None = None) -> None:
        self._library = load_library()
        for name in ("task_bytes", "mix_task_bytes", "pool_task_bytes", "highest_level"):
            getattr(self._library, f"lowtide_{name}").restype = ctypes.c_int64
        sizes = [getattr(self._library, f"lowtide_{name}_bytes")() for name in ("task", "mix_task", "pool_task")]
        assert sizes == [ctypes.sizeof(kind) for kind in (Task, MixTask, PoolTask)], "a struct and task.h differ"
        capability = level or torch.backends.cpu.get_cpu_capability()
        wanted = next((i for i, name in enumerate(LEVELS) if capability.startswith(name)), 0)
        self._level = ctypes.c_int64(min(wanted, self._library.lowtide_highest_level()))
        self.level = LEVELS[self._level.value]

    def supports(self, x: Tensor) -> bool:
        # a subclass (a fake tensor, for one) may have no memory behind it
        plain = type(x) is Tensor or type(x) is torch.nn.Parameter
        return plain and x.device.type == "cpu" and x.dtype in DTYPES and x.layout == torch.strided and not x.is_neg()

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = torch.empty(2, x.shape[1], dtype=accumulation_dtype(x))
        task = Task(
            *x.shape, form_of(x), 0, as_map(x, x), NO_MAP, NO_MAP,
            None, None, None, mean.data_ptr(), variance.data_ptr(),
        )  # fmt: skip
        self._library.lowtide_batch_stats(ctypes.byref(task), self._level)
        return mean, variance

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        form = PLANES_TO_ROWS if is_planes(x) and not is_planes(out) else form_of(x, out)
        task = Task(
            *x.shape, form, act == "relu", as_map(x, x), NO_MAP, as_map(out, x),
            address(scale, x), address(shift, x), None, None, None,
        )  # fmt: skip
        self._library.lowtide_scale_shift_act(ctypes.byref(task), self._level)

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums, sums_x = torch.zeros(2, x.shape[1], dtype=accumulation_dtype(x))
        task = Task(
            *x.shape, form_of(x, grad), act == "relu", as_map(x, x), as_map(grad, x), NO_MAP,
            address(scale, x), address(shift, x), address(mean, x), sums.data_ptr(), sums_x.data_ptr(),
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
        task = Task(
            *x.shape, form_of(x, grad_z, total), act == "relu", as_map(x, x), as_map(grad_z, x), as_map(total, x),
            address(scale, x), address(shift, x), address(mean, x), address(sums, x), address(sums_x, x),
        )  # fmt: skip
        self._library.lowtide_act_backward_accumulate(ctypes.byref(task), self._level)

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        task = Task(
            *x.shape, form_of(x, grad), 0, as_map(x, x), as_map(grad, x), NO_MAP,
            None if scale is None else address(scale, x), address(slope, x), address(offset, x), None, None,
        )  # fmt: skip
        self._library.lowtide_affine_add(ctypes.byref(task), self._level)

    def fuses_mix(self, x: Tensor, out: Tensor) -> bool:
        return self.supports(x) and is_rows(x) and is_rows(out)

    def norm_act_mix(self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, out: Tensor) -> None:
        weight = weight.to(scale.dtype).contiguous()
        n_images, n_inputs, n_positions = x.shape
        n_outputs = len(weight)
        assert is_rows(x)
        assert is_rows(out)
        task = MixTask(
            n_images, n_positions, n_inputs, n_outputs, (1, 1, n_positions), (0, 0, 0),
            as_map(x, x), as_map(out, x, n_outputs), NO_MAP, NO_MAP, 0,
            address(scale, x), address(shift, x), None, address(weight, x, n_outputs, n_inputs),
        )  # fmt: skip
        self._library.lowtide_mix_forward(ctypes.byref(task), self._level)

    def norm_act_mix_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        weight: Tensor,
        *,
        normed: Normed | None,
        total: Tensor | None,
        sums: Tensor | None,
        sums_x: Tensor | None,
        dweight: Tensor | None,
    ) -> None:
        assert (sums is None) == (sums_x is None)
        assert total is None or sums is not None
        weight = weight.to(scale.dtype).contiguous()
        n_images, n_inputs, n_positions = x.shape
        n_outputs = len(weight)
        y, *y_vectors = normed or (None, None, None, None)
        assert all(is_rows(a) for a in (x, grad, y, total) if a is not None)
        task = MixTask(
            n_images, n_positions, n_inputs, n_outputs, (1, 1, n_positions), (0, 0, 0),
            as_map(x, x), NO_MAP if y is None else as_map(y, x, n_outputs), as_map(grad, x, n_outputs),
            NO_MAP if total is None else as_map(total, x), 0,
            address(scale, x), address(shift, x), address(mean, x), address(weight, x, n_outputs, n_inputs),
            *(None if v is None else address(v, x, n_outputs) for v in y_vectors),
            *(None if v is None else address(v, x) for v in (sums, sums_x)),
            None if dweight is None else address(dweight, x, n_outputs, n_inputs),
        )  # fmt: skip
        self._library.lowtide_mix_backward(ctypes.byref(task), self._level)

    def norm_act_conv(
        self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        n_images, n_inputs, n_positions = x.shape
        taps = _taps(weight, scale.dtype)
        n_outputs = taps.shape[1]
        assert is_rows(x)
        assert is_rows(out)
        task = MixTask(
            n_images, n_positions, n_inputs, n_outputs, grid_of(spatial), _reach(weight),
            as_map(x, x), as_map(out, x, n_outputs), NO_MAP, NO_MAP, 0,
            address(scale, x), address(shift, x), None, address(taps, x, *taps.shape),
        )  # fmt: skip
        self._library.lowtide_mix_forward(ctypes.byref(task), self._level)

    def norm_act_conv_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        weight: Tensor,
        spatial: Sequence[int],
        *,
        masked: Tensor | None,
        dweight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        n_images, n_inputs, n_positions = x.shape
        taps = _taps(weight, scale.dtype)
        dtaps = None if dweight is None else torch.zeros_like(taps)
        sums, sums_x = torch.zeros(2, n_inputs, dtype=scale.dtype)
        assert all(is_rows(a) for a in (x, grad, masked) if a is not None)
        task = MixTask(
            n_images, n_positions, n_inputs, taps.shape[1], grid_of(spatial), _reach(weight),
            as_map(x, x), NO_MAP, as_map(grad, x, taps.shape[1]), NO_MAP if masked is None else as_map(masked, x), 1,
            address(scale, x), address(shift, x), address(mean, x), address(taps, x, *taps.shape), None, None, None,
            *(None if masked is None else v.data_ptr() for v in (sums, sums_x)),
            None if dtaps is None else dtaps.data_ptr(),
        )  # fmt: skip
        self._library.lowtide_mix_backward(ctypes.byref(task), self._level)
        if dweight is not None and dtaps is not None:
            dweight += dtaps.permute(1, 2, 0).unflatten(2, weight.shape[2:]).flip(_axes(weight))
        return sums, sums_x


def _axes(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(2, weight.dim()))


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A convolution's weight (K, C, *kernel) as (TAPS, K, C), turned round: see native_src/task.h."""
    return weight.to(dtype).flip(_axes(weight)).flatten(2).permute(2, 0, 1).contiguous()


def _reach(weight: Tensor) -> tuple[int, int, int]:
    assert all(size % 2 for size in weight.shape[2:]), f"a kernel {tuple(weight.shape[2:])} has no middle"
    depth, height, width = grid_of(weight.shape[2:])
    return depth // 2, height // 2, width // 2
