"""The elementwise passes in Triton, for CUDA; tested on the CPU in Triton's interpreter, never yet on a GPU.

Any strides are taken, planes and rows alike. Sums are made in two stages: every program sums a stretch of positions of
a few channels and stores its own partial result, and these are added up in float64, so the order in which programs run
does not matter.

The passes with a convolution are those of the tensor calls: cuBLAS and cuDNN, between the passes of this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernels.interface import Activation
from lowtide.kernels.tensor_calls import TensorCalls, accumulation_dtype

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CHANNELS, _POSITIONS = 16, 128  # of the tile that one program holds
_STRETCH = 8 * _POSITIONS  # positions whose sum one program makes


@triton.jit
def _tile(c_block, first, n_channels, count, positions, BC: tl.constexpr, BM: tl.constexpr):
    """Channel, image and position of every number of a tile, and which of them exist."""
    c = c_block * BC + tl.arange(0, BC)[:, None]
    m = first + tl.arange(0, BM)[None, :]
    here = (c < n_channels) & (m < count)
    # in 64 bits: one image of a buffer may hold more than 2^31 numbers
    return c.to(tl.int64), (m // positions).to(tl.int64), (m % positions).to(tl.int64), here


@triton.jit
def _scale_shift_act(
    x, x_n, x_c, x_s, out, out_n, out_c, out_s, scale, shift, n_channels, count, positions,
    RELU: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    c, n, s, here = _tile(tl.program_id(1), tl.program_id(0) * BM, n_channels, count, positions, BC, BM)
    a = tl.load(scale + c, mask=c < n_channels, other=0.0)
    b = tl.load(shift + c, mask=c < n_channels, other=0.0)
    z = tl.load(x + n * x_n + c * x_c + s * x_s, mask=here, other=0.0).to(a.dtype) * a + b
    if RELU:
        z = tl.where(z < 0, 0.0, z)
    tl.store(out + n * out_n + c * out_c + s * out_s, z.to(out.dtype.element_ty), mask=here)


@triton.jit
def _affine_add(
    x, x_n, x_c, x_s, grad, g_n, g_c, g_s, scale, slope, offset, n_channels, count, positions,
    SCALED: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    c, n, s, here = _tile(tl.program_id(1), tl.program_id(0) * BM, n_channels, count, positions, BC, BM)
    b = tl.load(slope + c, mask=c < n_channels, other=0.0)
    d = tl.load(offset + c, mask=c < n_channels, other=0.0)
    at = grad + n * g_n + c * g_c + s * g_s
    g = tl.load(at, mask=here, other=0.0).to(b.dtype)
    if SCALED:
        g = g * tl.load(scale + c, mask=c < n_channels, other=0.0)
    g = g + (tl.load(x + n * x_n + c * x_c + s * x_s, mask=here, other=0.0).to(b.dtype) * b + d)
    tl.store(at, g.to(grad.dtype.element_ty), mask=here)


@triton.jit
def _act_backward(
    x, x_n, x_c, x_s, grad, g_n, g_c, g_s, out, o_n, o_c, o_s, scale, shift, mean, partials,
    n_channels, count, positions,
    RELU: tl.constexpr, ACCUMULATE: tl.constexpr, STRETCH: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * BC + tl.arange(0, BC)[:, None]
    a = tl.load(scale + c, mask=c < n_channels, other=0.0)
    b = tl.load(shift + c, mask=c < n_channels, other=0.0)
    mu = tl.load(mean + c, mask=c < n_channels, other=0.0)
    total = tl.zeros((BC, BM), dtype=a.dtype)
    total_x = tl.zeros((BC, BM), dtype=a.dtype)
    for step in range(0, STRETCH, BM):
        c, n, s, here = _tile(tl.program_id(1), tl.program_id(0) * STRETCH + step, n_channels, count, positions, BC, BM)
        position = tl.load(x + n * x_n + c * x_c + s * x_s, mask=here, other=0.0).to(a.dtype)
        g = tl.load(grad + n * g_n + c * g_c + s * g_s, mask=here, other=0.0).to(a.dtype)
        if RELU:
            g = tl.where(position * a + b <= 0, 0.0, g)
        total += g
        # outside of the map g is zero, but 0 * NaN is not: a mean may be one
        total_x += tl.where(here, g * (position - mu), 0.0)
        at = out + n * o_n + c * o_c + s * o_s
        if ACCUMULATE:
            g = tl.load(at, mask=here, other=0.0).to(a.dtype) + g * a
        tl.store(at, g.to(out.dtype.element_ty), mask=here)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    to = partials + tl.program_id(0) * 2 * n_channels + channel
    tl.store(to, tl.sum(total, axis=1), mask=channel < n_channels)
    tl.store(to + n_channels, tl.sum(total_x, axis=1), mask=channel < n_channels)


@triton.jit
def _moments(
    x, x_n, x_c, x_s, pivot, partials, n_channels, count, positions,
    STRETCH: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """sum(x - pivot) and sum((x - pivot)^2) of one stretch."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)[:, None]
    p = tl.load(pivot + c, mask=c < n_channels, other=0.0)
    total = tl.zeros((BC, BM), dtype=p.dtype)
    square = tl.zeros((BC, BM), dtype=p.dtype)
    for step in range(0, STRETCH, BM):
        c, n, s, here = _tile(tl.program_id(1), tl.program_id(0) * STRETCH + step, n_channels, count, positions, BC, BM)
        d = tl.load(x + n * x_n + c * x_c + s * x_s, mask=here, other=0.0).to(p.dtype) - p
        d = tl.where(here, d, 0.0)
        total += d
        square += d * d
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    to = partials + tl.program_id(0) * 2 * n_channels + channel
    tl.store(to, tl.sum(total, axis=1), mask=channel < n_channels)
    tl.store(to + n_channels, tl.sum(square, axis=1), mask=channel < n_channels)


INTERPRETED = not isinstance(_moments, triton.JITFunction)  # TRITON_INTERPRET=1 when this was imported


class TritonKernels(TensorCalls):
    """Provider "triton"."""

    name = "triton"
    device_type = "cpu" if INTERPRETED else "cuda"
    where = "the CPU, in Triton's interpreter" if INTERPRETED else "CUDA"

    def __init__(self) -> None:
        self._failures: dict[torch.device, str] = {}

    def supports(self, x: Tensor) -> bool:
        plain = type(x) is Tensor or type(x) is torch.nn.Parameter
        return plain and x.device.type == self.device_type and x.dtype in _DTYPES and not x.is_neg()

    def failure(self, device: torch.device) -> str:
        """Why Triton cannot be used on this device: a pass is compiled and run there once; "" if that went well."""
        if device not in self._failures:
            self._failures[device] = self._try(device)
        return self._failures[device]

    def _try(self, device: torch.device) -> str:
        x = torch.arange(6.0, device=device).view(1, 2, 3)
        one, out = torch.ones(2, device=device), torch.empty_like(x)
        try:
            self.scale_shift_act(x, one, -2 * one, "relu", out)
        except Exception as error:  # no C compiler, a GPU that is too old, a driver that is: each has its own type
            return f"a first pass failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return "" if out.equal((x - 2).clamp(min=0)) else "a first pass gave a wrong result"

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(x)
        count = x.shape[0] * x.shape[2]
        pivot = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        mean = variance = pivot.double()
        # around the mean of the first round nothing cancels
        for _ in range(2):
            total, square = self._sums(_moments, x, (*_maps(x, x), pivot)) / count
            mean, variance = pivot.double() + total, (square - total.square()).clamp_min(0)
            pivot = mean.to(dtype)
        return mean.to(dtype), variance.to(dtype)

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        if x.numel():
            arguments = (*_maps(x, x, out), *_vectors(x, scale, shift), *_sizes(x))
            _launch(_scale_shift_act, x, _POSITIONS, arguments, RELU=act == "relu")

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        arguments = (*_maps(x, x, grad, grad), *_vectors(x, scale, shift, mean))
        total, total_x = self._sums(_act_backward, x, arguments, RELU=act == "relu", ACCUMULATE=False)
        return total.to(mean.dtype), total_x.to(mean.dtype)

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
        arguments = (*_maps(x, x, grad_z, total), *_vectors(x, scale, shift, mean))
        more, more_x = self._sums(_act_backward, x, arguments, RELU=act == "relu", ACCUMULATE=True)
        sums += more
        sums_x += more_x

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        if x.numel():
            vectors = _vectors(x, slope if scale is None else scale, slope, offset)
            arguments = (*_maps(x, x, grad), *vectors, *_sizes(x))
            _launch(_affine_add, x, _POSITIONS, arguments, SCALED=scale is not None)

    def _sums(self, kernel: Any, x: Tensor, arguments: tuple[object, ...], **flags: bool) -> Tensor:
        """Both sums of every channel, (2, C) in float64."""
        programs, _ = _grid(x, _STRETCH)
        partials = torch.zeros(programs, 2, x.shape[1], dtype=accumulation_dtype(x), device=x.device)
        if x.numel():
            _launch(kernel, x, _STRETCH, (*arguments, partials, *_sizes(x)), **flags, STRETCH=_STRETCH)
        return partials.sum(0, dtype=torch.float64)


def _launch(kernel: Any, x: Tensor, stretch: int, arguments: tuple[object, ...], **constants: bool | int) -> None:
    # Triton launches on the current device, which need not be the one of the tensors
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        kernel[_grid(x, stretch)](*arguments, **constants, BC=_CHANNELS, BM=_POSITIONS)


def _maps(x: Tensor, *maps: Tensor) -> Iterator[Tensor | int]:
    """Every map with its strides; a kernel trusts them to be as large as x."""
    for tensor in maps:
        assert tensor.shape == x.shape, f"a map of shape {tuple(tensor.shape)} where {tuple(x.shape)} belongs"
        assert tensor.device == x.device, f"a map on {tensor.device} beside one on {x.device}"
        assert (tensor.dtype == torch.float64) == (x.dtype == torch.float64), f"{tensor.dtype} beside {x.dtype}"
        yield tensor
        yield from tensor.stride()


def _vectors(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    for vector in vectors:
        assert vector.shape == x.shape[1:2], f"shape {tuple(vector.shape)} where {(x.shape[1],)} belongs"
        assert vector.dtype == accumulation_dtype(x), f"{vector.dtype} beside a map of {x.dtype}"
        assert vector.is_contiguous()
        assert vector.device == x.device, f"a vector on {vector.device} beside a map on {x.device}"
    return vectors


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Channels, numbers per channel, positions."""
    count = x.shape[0] * x.shape[2]
    assert count < 2**31 - _STRETCH, f"{count} positions: the passes count them in 32 bits"
    return x.shape[1], count, x.shape[2]


def _grid(x: Tensor, stretch: int) -> tuple[int, int]:
    return triton.cdiv(x.shape[0] * x.shape[2], stretch), triton.cdiv(x.shape[1], _CHANNELS)
