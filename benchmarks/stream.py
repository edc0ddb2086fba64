"""Streaming: what a token costs, what a block costs, and a layer over a file larger than its memory.

Case `token`: 1,048,576 taps, 256 channels, kernel_dim 32, batch 1, float32. The convolution alone, one sample
at a time: lowtide's cascade, a direct dot product over a ring of all the taps, and partitioned overlap-save
(`PartitionFilter`), whose dear tokens come at the ends of partitions: its mean and its worst token are put
together from the measured parts, as one period is 131,072 tokens. The worst of the others is the slowest of the
run. Beside them a step of the whole layer, and the same token early and late in one stream; and, to tell the machine's
own interruptions from ours, one sum over as many numbers of a large buffer as a token reads of ring and coefficients.

Case `block`: seconds per sample in blocks, for a long and a short kernel; beside the short one the forward by FFT.

Case `apply`: a two-sided layer over (256, 1,000,000) float32 in 500 MiB, killed and resumed (stream_apply.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import stream_apply
import torch
from harness import console, quantile
from rich.table import Table
from torch import Tensor

from lowtide.functional import StreamFilter, stream_block_rows, stream_filter, stream_filter_of_taps, stream_state
from lowtide.lean import stream_partitions
from lowtide.lean.stream_cascade import CellFilter
from lowtide.measure.units import format_bytes, format_seconds
from lowtide.nn import SGConv
from lowtide.stream import save_layer

H, KERNEL_DIM, L_MAX = 256, 32, 2**20


@dataclass
class Figure:
    """Seconds per token (or sample); `state_bytes`: what the stream carries from token to token (apply: high-water)."""

    case: str
    contender: str
    median_seconds: float
    p99_seconds: float
    worst_seconds: float
    mean_seconds: float
    state_bytes: int
    direct_ratio: float = float("nan")


def figure_of(case: str, contender: str, seconds: list[float], carried: int) -> Figure:
    mean = sum(seconds) / len(seconds)
    return Figure(case, contender, quantile(seconds, 0.5), quantile(seconds, 0.99), max(seconds), mean, carried)


def make_layer(features: int, l_max: int, **options: bool) -> SGConv:
    torch.manual_seed(0)
    return SGConv(features, l_max, kernel_dim=KERNEL_DIM, **options).eval()


def filter_of(layer: SGConv) -> StreamFilter:
    pieces = [piece.detach() for piece in layer.kernel_list]
    return stream_filter(pieces, layer.multiplier, None, layer.kernel_norm, layer.D.detach(), form=layer.form.kernel)


def bytes_of(state: dict[str, Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in state.values())


def seconds_of(step: Callable[[], object], repeats: int, per: int = 1) -> list[float]:
    """Seconds of each call, over `per`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append((time.perf_counter() - start) / per)
    return seconds


def direct(taps_HK: Tensor) -> tuple[Callable[[], Tensor], int]:
    """A ring (H, K) and, wherever it begins, two dot products per channel with the reversed taps."""
    K = taps_HK.shape[1]
    ring, reversed_taps = torch.randn(H, K), taps_HK.flip(1)
    u, position = torch.randn(H), K // 3

    def step() -> Tensor:
        nonlocal position
        newest = position % K
        ring[:, newest] = u
        position += 1
        old, new = K - 1 - newest, newest + 1
        y = torch.bmm(ring[:, None, :new], reversed_taps[:, old:, None])
        return y + torch.bmm(ring[:, None, new:], reversed_taps[:, :old, None])

    return step, ring.numel() * ring.element_size()


def witness(numbers: int) -> Callable[[], Tensor]:
    """The sum of so many numbers that were long not touched: its slow calls are the machine's."""
    buffer = torch.ones(L_MAX * H // numbers, numbers)
    at = -1

    def step() -> Tensor:
        nonlocal at
        at = (at + 1) % buffer.shape[0]
        return buffer[at].sum()

    return step


def partitioned(taps_HK: Tensor, repeats: int) -> Figure:
    """Median and p99: tokens between boundaries. The parts of the dear ones are measured one by one."""
    filter = stream_filter_of_taps(taps_HK.unsqueeze(0))
    assert isinstance(filter, stream_partitions.PartitionFilter)
    state = stream_state(filter, 1)
    u = torch.randn(1, 1, H)
    plain: list[float] = []
    for index in range(repeats):
        seconds = seconds_of(lambda: stream_block_rows(u, state, filter), 1)
        plain += seconds if (index + 1) % stream_partitions.HEAD else []
    boundary = filter.longest
    fired = {
        n: quantile(seconds_of(lambda n=n: stream_partitions.fire(n, boundary, state, filter), 2), 0.5)
        for n in filter.spectra
    }
    figure = figure_of("token", f"partitioned FFT, up to {filter.longest} taps", plain, bytes_of(state))
    figure.mean_seconds += sum(seconds / n for n, seconds in fired.items())
    figure.worst_seconds = figure.median_seconds + sum(fired.values())
    return figure


def token(quick: bool) -> list[Figure]:
    layer = make_layer(H, L_MAX)
    filter = filter_of(layer)
    state, layer_state = stream_state(filter, 1), layer.initial_state(1)
    u = torch.randn(1, 1, H)
    taps = layer.kernel(layer.form.kernel.taps)[0].detach()
    direct_step, direct_bytes = direct(taps)
    many, few = (1000, 5) if quick else (10_000, 10)

    def measure(name: str, step: Callable[[], object], carried: int, repeats: int) -> Figure:
        seconds_of(step, repeats // 5)  # first touch of memory, clocks
        return figure_of("token", name, seconds_of(step, repeats), carried)

    assert isinstance(filter, CellFilter)
    read = witness(3 * filter.plan.level_ends[-1] * H)
    rounds = [
        [
            measure("lowtide", lambda: stream_block_rows(u, state, filter), bytes_of(state), many),
            measure("lowtide, whole layer", lambda: layer.step(u[0], layer_state), bytes_of(layer_state), many),
            measure("a sum over as many numbers as a token reads", read, 0, many),
            measure("direct dot product over a ring", direct_step, direct_bytes, few),
        ]
        for _ in range(1 if quick else 3)  # in turns; of each contender the round with the middle median counts
    ]
    figures = [sorted(column, key=lambda f: f.median_seconds)[len(rounds) // 2] for column in zip(*rounds, strict=True)]
    del direct_step, read
    figures.append(partitioned(taps, 200 if quick else 1000))
    del taps
    fresh = stream_state(filter, 1)
    block = torch.randn(1000, 1, H)
    for at in (10**3, 10**5 if quick else 10**6):
        while int(fresh["position"]) < at:
            stream_block_rows(block, fresh, filter)
        name = f"lowtide from token {at:,} on"
        figures.append(measure(name, lambda: stream_block_rows(u, fresh, filter), bytes_of(fresh), many))
    for figure in figures:
        figure.direct_ratio = figures[3].median_seconds / figure.median_seconds
    return figures


def blocks(l_max: int, quick: bool) -> list[Figure]:
    layer = make_layer(H, l_max, linear=True)
    filter = filter_of(layer)
    state = stream_state(filter, 1)
    case = f"block, {layer.form.kernel.taps} taps"
    figures = []

    def measure(name: str, u: Tensor, repeats: int) -> None:
        seconds = seconds_of(lambda: stream_block_rows(u, state, filter), repeats, per=u.shape[0])
        figures.append(figure_of(case, name, seconds, bytes_of(state)))

    for size in (1, 16, 64, 1000):
        measure(f"blocks of {size}", torch.randn(size, 1, H), 20_000 // (10 if quick else 1) // (size + 19))
    if l_max < L_MAX:
        u = torch.randn(1, H, 16 * l_max)
        measure(f"one block of {u.shape[-1]}", u.permute(2, 0, 1).contiguous(), 5)
        with torch.no_grad():
            seconds = seconds_of(lambda: layer(u), 5, per=u.shape[-1])
        figures.append(figure_of(case, f"forward by FFT, {u.shape[-1]} samples", seconds, 0))
    return figures


def apply(quick: bool) -> list[Figure]:
    features, L, memory_bytes = (32, 200_000, 100 * 2**20) if quick else (H, 1_000_000, 500 * 2**20)
    layer = make_layer(features, L, bidirectional=True)
    with tempfile.TemporaryDirectory() as folder:
        save_layer(layer, Path(folder) / "layer.pt")
        done = stream_apply.measure(layer, Path(folder), features, L, memory_bytes)
    rule = "the rule holds" if done.keeps_the_rule else "THE RULE DOES NOT HOLD"
    same = "equal bit for bit" if done.resumed_is_equal else "DIFFERENT"
    for line in (
        f"out of core, {features} x {L}, two-sided, {done.channels} channels at a time: {format_seconds(done.seconds)}",
        f"high-water {format_bytes(done.high_water_bytes)} over the libraries, {format_bytes(memory_bytes)} allowed",
        f"relative error {done.error:.2e}, of the plain layer in float32 {done.plain_error:.2e}: {rule}",
        f"killed at {done.killed_at} and resumed: {same}",
    ):
        console.print(line)
    return [figure_of("apply", f"two-sided ({features}, {L})", [done.seconds / L], done.high_water_bytes)]


def show(figures: list[Figure]) -> None:
    table = Table(title=figures[0].case, title_justify="left")
    for column in ("", "median", "p99", "worst", "mean", "direct / median", "state"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for f in figures:
        ratio = f"{f.direct_ratio:.0f}" if f.direct_ratio == f.direct_ratio else "-"
        times = (format_seconds(s) for s in (f.median_seconds, f.p99_seconds, f.worst_seconds, f.mean_seconds))
        table.add_row(f.contender, *times, ratio, format_bytes(f.state_bytes))
    console.print(table)


def run(*, quick: bool = False, only: str = "") -> list[Figure]:
    cases: dict[str, list[Callable[[bool], list[Figure]]]] = {
        "token": [token],
        "block": [lambda quick: blocks(L_MAX, quick), lambda quick: blocks(4096, quick)],
        "apply": [apply],
    }
    figures: list[Figure] = []
    for name, parts in cases.items():
        for part in parts if only in ("", name) else ():
            found = part(quick)
            show(found)
            figures += found
    return figures
