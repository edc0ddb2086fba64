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

from lowtide.kernels import Kernels, Normed, TensorCalls
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
# (images, channels of the buffer, channels in, channels out, grid, kernel size) of the passes with a convolution
PRODUCTS = {
    "BC-100 1x1": (64, 216, 120, 48, (32, 32), 1),
    "BC-100 3x3": (64, 48, 48, 12, (32, 32), 3),
    "121 first 1x1": (16, 256, 160, 128, (56, 56), 1),
    "121 first 3x3": (16, 128, 128, 32, (56, 56), 3),
    "121 last 1x1": (16, 1024, 992, 128, (7, 7), 1),
    "3-D 3x3": (1, 128, 128, 32, (24, 24, 24), 3),
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


def products(
    kernels: Kernels, shape: tuple[int, int, int, int, tuple[int, ...], int], dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object], float]:
    """(forward, backward, 1e9 operations of the forward) of a norm, relu and convolution, maps in rows."""
    n_images, n_buffer, n_inputs, n_outputs, grid, kernel = shape
    n_positions = torch.Size(grid).numel()
    x, total = (make_map((n_images, n_buffer, n_inputs, n_positions), "rows", dtype) for _ in range(2))
    y, grad = (make_map((n_images, n_outputs, n_outputs, n_positions), "rows", dtype) for _ in range(2))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    scale, shift, mean = (torch.randn(n_inputs).to(acc) * 0.1 for _ in VECTORS)
    sums, sums_x = torch.zeros(2, n_inputs, dtype=acc)
    operations = 2 * n_images * n_positions * n_inputs * n_outputs * kernel ** len(grid) / 1e9
    if kernel == 1:
        weight, dweight = torch.randn(n_outputs, n_inputs).to(acc), torch.zeros(n_outputs, n_inputs, dtype=acc)
        norm = Normed(y, *torch.randn(3, n_outputs).to(acc))
        targets = {"total": total, "sums": sums, "sums_x": sums_x, "dweight": dweight}
        return (
            lambda: kernels.norm_act_mix(x, scale, shift, weight, y),
            lambda: kernels.norm_act_mix_backward(grad, x, scale, shift, mean, weight, normed=norm, **targets),
            operations,
        )
    weight = torch.randn(n_outputs, n_inputs, *[kernel] * len(grid)).to(acc)
    dweight = torch.zeros_like(weight)
    return (
        lambda: kernels.norm_act_conv(x, scale, shift, weight, grid, y),
        lambda: kernels.norm_act_conv_backward(
            grad, x, scale, shift, mean, weight, grid, masked=total, dweight=dweight
        ),
        operations,
    )


def print_products(native: Kernels, dtype: torch.dtype, repeats: int, evict: Tensor | None) -> None:
    print("| product | direction | tensor ms | native ms | tensor / native | native GFLOP/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, shape in PRODUCTS.items():
        *slow, _ = products(TensorCalls(), shape, dtype)
        *fast, operations = products(native, shape, dtype)
        for i, direction in enumerate(("forward", "backward")):
            tensor_s, native_s = (seconds(calls[i], repeats, evict) for calls in (slow, fast))
            rate = operations * (i + 1) / native_s
            row = f"{tensor_s * 1e3:.2f} | {native_s * 1e3:.2f} | {tensor_s / native_s:.1f} | {rate:.0f}"
            print(f"| {name} | {direction} | {row} |")


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
    parser.add_argument("--products", action="store_true", help="only the passes with a convolution")
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
    if arguments.products:
        print_products(native, dtype, arguments.repeats, evict)
        return
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
