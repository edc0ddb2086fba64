"""Time each pass of each provider against the memory's speed: `python benchmarks/kernels.py [--threads 2]`.

The memory's speed is that of a copy between two large buffers (bytes read plus bytes written). "of copy" is the share
of that speed that a pass reaches, counting the bytes it must read and write once. Before each call another buffer is
read, so that the caches hold nothing that a step would have to fetch; `--warm` leaves them alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.kernels import Kernels, TensorCalls
from lowtide.kernels.native import NativeKernels

# (images, channels of the buffer, channels, positions): what is passed over at once in a step
SHAPES = {
    "BC-100 tile": (8, 216, 120, 1024),
    "BC-100 tile 24": (32, 216, 24, 1024),
    "BC-100 map": (64, 48, 48, 1024),
    "BC-100 new": (64, 216, 12, 1024),
    "BC-100 last": (64, 342, 342, 64),
    "121 first": (16, 256, 128, 3136),
    "121 last": (16, 1024, 1024, 49),
    "3-D": (1, 256, 128, 13824),
}
VECTORS = ("scale", "shift", "mean")


def make_map(shape: tuple[int, int, int, int], form: str, dtype: torch.dtype) -> Tensor:
    n_images, n_buffer, n_channels, n_positions = shape
    if form == "planes":
        return torch.randn(n_images, n_buffer, n_positions).to(dtype)[:, :n_channels]
    return torch.randn(n_images, n_positions, n_buffer).to(dtype)[:, :, :n_channels].transpose(1, 2)


def passes(
    kernels: Kernels, shape: tuple[int, int, int, int], form: str, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (call, maps read and written)."""
    n_images, _, n_channels, n_positions = shape
    x, total = make_map(shape, form, dtype), make_map(shape, form, dtype)
    tile_shape = (n_images, n_channels, n_channels, n_positions)
    tile, grad = make_map(tile_shape, form, dtype), make_map(tile_shape, form, dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    scale, shift, mean = (torch.randn(n_channels).to(acc) * 0.1 for _ in VECTORS)
    sums, sums_x = torch.zeros(2, n_channels, dtype=acc)
    return {
        "batch_stats": (lambda: kernels.batch_stats(x), 1),
        "scale_shift_act": (lambda: kernels.scale_shift_act(x, scale, shift, "relu", tile), 2),
        "act_backward_sums_": (lambda: kernels.act_backward_sums_(grad, x, scale, shift, "relu", mean), 3),
        "act_backward_accumulate": (
            lambda: kernels.act_backward_accumulate(grad, x, scale, shift, "relu", mean, total, sums, sums_x),
            4,
        ),
        "affine_add_": (lambda: kernels.affine_add_(grad, scale, x, shift, mean), 3),
    }


def seconds(call: Callable[[], object], repeats: int, evict: Tensor | None = None) -> float:
    call()
    times = []
    for _ in range(repeats):
        if evict is not None:
            evict.sum()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--forms", nargs="*", default=["planes", "rows"], choices=["planes", "rows"])
    parser.add_argument("--warm", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    big = torch.zeros(1 << 25)
    copy = torch.empty_like(big)
    speed = 2 * big.numel() * 4 / seconds(lambda: copy.copy_(big), arguments.repeats)
    evict = None if arguments.warm else big
    native = NativeKernels()
    print(f"copy {speed / 1e9:.1f} GB/s, {arguments.threads} threads, {arguments.dtype}, native {native.level}")
    print("| shape | form | pass | MiB moved | tensor ms | native ms | tensor / native | native of copy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.shapes:
        shape = SHAPES[name]
        for form in arguments.forms:
            tensor_passes = passes(TensorCalls(), shape, form, dtype)
            for label, (call, maps) in passes(native, shape, form, dtype).items():
                moved = maps * shape[0] * shape[2] * shape[3] * dtype.itemsize
                slow = seconds(tensor_passes[label][0], arguments.repeats, evict)
                fast = seconds(call, arguments.repeats, evict)
                print(
                    f"| {name} | {form} | {label} | {moved / 2**20:.1f} | {slow * 1e3:.2f} | {fast * 1e3:.3f} "
                    f"| {slow / fast:.1f} | {moved / fast / speed:.2f} |"
                )


if __name__ == "__main__":
    main()
