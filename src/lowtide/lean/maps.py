"""Maps as (N, C, S) views in one of two forms, and the few products that run on them tile by tile.

rows form      channel stride 1: the memory is (N, S, C), "channels_last". GEMMs and the 3x3 convolution are faster
               in it on the CPU.
last stride 1  the memory is (N, C, S), contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# z and dz of one tile should stay in the second-level cache of the threads that share it
CPU_TILE_BYTES_PER_THREAD = 2**20
# on a GPU a tile only bounds memory: large enough that launches do not count
GPU_TILE_BYTES = 2**26


def tile_bytes(device: torch.device) -> int:
    return CPU_TILE_BYTES_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else GPU_TILE_BYTES


def is_channels_last(x: Tensor) -> bool:
    """Whether ordinary operations would answer in channels_last for this (N, C, *S) map."""
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def as_channels_last(weight: Tensor) -> Tensor:
    """A copy of a convolution's weight in channels_last, so that the convolution answers in it.

    Of one input channel too, where `contiguous` leaves strides that say nothing.
    """
    return new_images(weight, weight.shape, channels_last=True, dtype=weight.dtype).copy_(weight)


def new_images(like: Tensor, shape: Sequence[int], *, channels_last: bool, dtype: torch.dtype) -> Tensor:
    """An uninitialised (N, C, *S) map in the memory order that ordinary operations would give it."""
    order = (
        {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if channels_last else torch.contiguous_format
    )
    return torch.empty(tuple(shape), dtype=dtype, device=like.device, memory_format=order)


def new_map(like: Tensor, n: int, c: int, s: int, *, rows: bool, dtype: torch.dtype) -> Tensor:
    """An uninitialised (n, c, s) map."""
    if rows:
        return torch.empty(n, s, c, dtype=dtype, device=like.device).transpose(1, 2)
    return torch.empty(n, c, s, dtype=dtype, device=like.device)


def is_rows(x: Tensor) -> bool:
    """Whether an (N, C, S) map is in rows form."""
    return x.stride(1) == 1 and (x.shape[2] == 1 or x.stride(2) != 1)


def in_form_of(like: Tensor, x: Tensor) -> Tensor:
    """x, copied if its form is not that of `like`: some operations answer in one memory order only."""
    if is_rows(x) == is_rows(like):
        return x
    return new_map(x, *x.shape, rows=is_rows(like), dtype=x.dtype).copy_(x)


def to_grid(x: Tensor, spatial: Sequence[int]) -> Tensor:
    """(N, C, S) as (N, C, *spatial); one spatial axis becomes (1, S), so that two-dimensional operations serve it."""
    return x.unflatten(2, grid_of(spatial))


def grid_of(spatial: Sequence[int]) -> tuple[int, ...]:
    return (1, *spatial) if len(spatial) == 1 else tuple(spatial)


def kernel_grid(weight: Tensor) -> Tensor:
    """A convolution's weight for `to_grid` maps."""
    return weight.unsqueeze(2) if weight.dim() == 3 else weight


class Scratch:
    """Tiles that live for one call; each key is one allocation, reused by every layer."""

    def __init__(self, like: Tensor, dtype: torch.dtype, *, rows: bool) -> None:
        self._like, self._dtype, self._rows = like, dtype, rows
        self._flat: dict[str, Tensor] = {}

    def __call__(self, key: str, n: int, c: int, s: int, *, rows: bool | None = None) -> Tensor:
        size = n * c * s
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            self._flat[key] = flat = torch.empty(size, dtype=self._dtype, device=self._like.device)
        if self._rows if rows is None else rows:
            return flat[:size].view(n, s, c).transpose(1, 2)
        return flat[:size].view(n, c, s)


def image_tiles(n: int, bytes_per_image: int, budget: int) -> Iterator[slice]:
    """Slices of images, at least one image each."""
    step = max(1, budget // max(1, bytes_per_image))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def position_tiles(n: int, s: int, bytes_per_position: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of images and positions; images are cut only where one of them alone exceeds the budget twofold."""
    if n * s == 0:
        return
    if s * bytes_per_position <= 2 * budget:
        for images in image_tiles(n, s * bytes_per_position, budget):
            yield images, slice(0, s)
        return
    step = max(64, budget // bytes_per_position)
    for image in range(n):
        for start in range(0, s, step):
            yield slice(image, image + 1), slice(start, min(s, start + step))


def _as_matrix(x: Tensor) -> Tensor | None:
    """A rows-form map as an (N*S, C) matrix without a copy, if its memory allows."""
    n, c, s = x.shape
    if not is_rows(x):
        return None
    if s == 1:
        return x.squeeze(2)
    if n > 1 and x.stride(0) != s * x.stride(2):
        return None
    return x.as_strided((n * s, c), (x.stride(2), 1))


def _fits_onednn(*maps: Tensor) -> bool:
    """Whether a 1x1 convolution of these rows-form maps is the fastest product.

    oneDNN runs it twice as fast as the BLAS behind `mm` where that one does not know the processor. float64 has no such
    path.
    """
    return all(
        x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and _as_matrix(x) is not None
        for x in maps
    ) and bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def _pointwise(weight: Tensor, x: Tensor) -> Tensor:
    """weight (o, c) applied to rows-form x (N, c, S) as a 1x1 convolution: rows-form (N, o, S)."""
    image = x.unflatten(2, (1, x.shape[2]))
    return torch.convolution(image, weight[:, :, None, None], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).flatten(2)


def mix(weight: Tensor, x: Tensor, out: Tensor) -> None:
    """out = weight (o, c) applied to the channels of x (N, c, S): a 1x1 convolution as a GEMM; out (N, o, S)."""
    if _fits_onednn(x):
        out.copy_(_pointwise(weight, x))
        return
    x_rows, out_rows = _as_matrix(x), _as_matrix(out)
    if x_rows is not None and out_rows is not None:
        torch.mm(x_rows, weight.t(), out=out_rows)
    elif is_rows(out):
        torch.bmm(x.transpose(1, 2), weight.t().expand(x.shape[0], -1, -1), out=out.transpose(1, 2))
    else:
        torch.bmm(weight.expand(x.shape[0], -1, -1), x, out=out)


def mixed(weight: Tensor, x: Tensor, scratch: Scratch, key: str, *, rows: bool) -> Tensor:
    """As `mix`, into memory of its own or scratch; the result lives until the next call."""
    if rows and _fits_onednn(x):
        return _pointwise(weight, x)
    out = scratch(key, x.shape[0], weight.shape[0], x.shape[2], rows=rows)
    mix(weight, x, out)
    return out


def add_outer_(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total (o, c) += sum over images and positions of grad (N, o, S) times x (N, c, S): the 1x1 weight gradient."""
    if _fits_onednn(grad, x):
        weight = total.to(x.dtype)[:, :, None, None]  # only its shape is read
        line = (1, x.shape[2])
        _, part, _ = torch.ops.aten.convolution_backward(
            grad.unflatten(2, line), x.unflatten(2, line), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [False, True, False],
        )  # fmt: skip
        total += part[:, :, 0, 0]
        return
    grad_rows, x_rows = _as_matrix(grad), _as_matrix(x)
    if grad_rows is not None and x_rows is not None:
        if total.dtype == x.dtype:
            total.addmm_(grad_rows.t(), x_rows)
        else:
            total += grad_rows.t() @ x_rows
    else:
        total += torch.bmm(grad, x.transpose(1, 2)).sum(0)


def convolve(x: Tensor, spatial: Sequence[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Same-size convolution of x (N, c, S): (N, k, *grid)."""
    kernel = kernel_grid(weight)
    padding = [size // 2 for size in kernel.shape[2:]]
    ones, zeros = [1] * len(padding), [0] * len(padding)
    return torch.convolution(to_grid(x, spatial), kernel, bias, ones, padding, ones, False, zeros, 1)


def convolve_backward(
    grad: Tensor, x: Tensor, spatial: Sequence[int], weight: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `convolve` by x, as (N, c, S), and by the weight. grad (N, k, S)."""
    kernel = kernel_grid(weight)
    padding = [size // 2 for size in kernel.shape[2:]]
    ones, zeros = [1] * len(padding), [0] * len(padding)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        to_grid(grad, spatial), to_grid(x, spatial), kernel, None, ones, padding, ones, False, zeros, 1, [*needs, False]
    )
    return None if dx is None else dx.flatten(2), None if dw is None else dw.view(weight.shape)
