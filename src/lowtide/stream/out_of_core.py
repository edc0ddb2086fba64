"""An SGConv layer over a sequence that does not fit into memory: channels in, time tiles out.

First the convolution with its skip term, a few channels at a time over the whole sequence: nothing but the state of a
stream stays in memory, and a two-sided layer's reverse kernels stream from the end to the beginning. The pre-activation
goes to a scratch file. Then activation, norm and output map, a few positions at a time for all channels.

A tile is on the disk before it is noted as done, so a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.nn import SGConv
from lowtide.stream.arrays import DiskArray, Sequence, open_array
from lowtide.stream.budget import Tiles, choose_tiles
from lowtide.stream.job import Files, Stage, run_job, scratch_path, where_it_stopped
from lowtide.stream.layer_tiles import DTYPES, convolve, map_outputs
from lowtide.stream.progress import Report

Announce = Callable[[Tiles, int, bool], None]


@dataclass(frozen=True)
class Applied:
    """What a run did: shapes and files, and the tiles that its memory allowed."""

    output: Path
    shape: tuple[int, ...]
    tiles: Tiles
    scratch_bytes: int
    resumed: bool


def apply_layer(
    layer: SGConv,
    source: Path,
    target: Path,
    *,
    memory_bytes: int = 500 * 2**20,
    shape: tuple[int, ...] | None = None,
    scratch: Path | None = None,
    report: Report | None = None,
    announce: Announce | None = None,
) -> Applied:
    """layer(source) -> target, in eval mode, within `memory_bytes` beside the imported libraries and the weights.

    Args:
        layer: float32 or float64, on the CPU.
        source: `.npy` of (H, L) or (B, H, L), or (.., L, H) if not transposed, as for `forward`; float16, 32 or 64.
            With `shape` raw float32.
        target: `.npy` if named so, else raw; in the layer's dtype. It appears when it is complete: until then the
            output lies beside it as NAME.partial, with NAME.progress.
        memory_bytes: bound for the arrays at work; the tiles are derived from it.
        scratch: folder of the scratch file, channels * H * L numbers; by default the target's.
        report: called with (stage, done, total) behind each tile.
        announce: called once with the tiles, the scratch file's bytes and whether an earlier run is continued.

    Raises:
        ArgumentError: a layer, shape or memory that cannot be used.
        DataError: files that cannot be read or written, or the leftovers of another run.
    """
    dtype = disk_dtype(layer.D)
    with open_array(source, shape) as u:
        B, H, L = _sizes(layer, u)
        form = layer.form
        maps = 0 if layer.output_linear is None else layer.output_linear.out_features
        tiles = choose_tiles(form, H, maps, L, dtype.itemsize, memory_bytes)
        D = form.channels * H
        O = D if form.linear else H
        row_shape = (O, L) if form.transposed else (L, O)
        folder = scratch or target.parent
        files = Files(
            target,
            row_shape if len(u.shape) == 2 else (B, *row_shape),
            dtype,
            folder,
            None if form.linear else (D, L),
            fingerprint(u, scratch_path(target, folder), (form,), layer.state_dict()),
        )

        def stages_of(row: int, output: DiskArray, scratch_file: DiskArray) -> list[Stage]:
            source, y = (
                Sequence(array if len(array.shape) == 2 else array.row(row), form.transposed) for array in (u, output)
            )
            p = y if form.linear else Sequence(scratch_file, True)

            def write_map(times: slice) -> None:
                y.write(map_outputs(layer, p, times).T.numpy(), slice(0, O), times)

            stages = [Stage("convolution", H, tiles.channels, lambda tile: convolve(layer, source, p, L, tile, block))]
            return stages if form.linear else [*stages, Stage("map", L, tiles.positions, write_map)]

        block = tiles.block
        progress = where_it_stopped(files)
        if announce is not None:
            announce(tiles, files.scratch_bytes, progress.begun)
        run_job(files, B, stages_of, progress, report or (lambda stage, done, total: None))
        return Applied(target, files.shape, tiles, files.scratch_bytes, progress.begun)


def disk_dtype(weight: Tensor) -> np.dtype:
    """What the files hold.

    Raises:
        ArgumentError: weights of another dtype or device than out-of-core runs compute with.
    """
    if weight.dtype not in DTYPES or weight.device.type != "cpu":
        got = f"{weight.dtype} on {weight.device}"
        expected = "a float32 or float64 model on the CPU"
        raise ArgumentError(describe(expected=expected, got=got, where="stream apply"))
    return DTYPES[weight.dtype]


def fingerprint(u: DiskArray, scratch: Path, forms: Iterable[object], weights: dict[str, Tensor]) -> str:
    """Tells this run from one with another input, other weights or other options."""
    about = os.fstat(u.file)
    run = hashlib.sha256()
    for part in (u.path.resolve(), u.shape, about.st_size, about.st_mtime_ns, scratch.resolve(), *forms):
        run.update(repr(part).encode())
    for name, tensor in weights.items():
        run.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return run.hexdigest()


def _sizes(layer: SGConv, u: DiskArray) -> tuple[int, int, int]:
    """(B, H, L) of the input file."""
    H = layer.D.shape[1]
    if len(u.shape) == 2:
        shape = (1, *u.shape)
    elif len(u.shape) == 3:
        shape = u.shape
    else:
        shape = (0, 0, 0)
    B, found_H, L = shape if layer.form.transposed else (shape[0], shape[2], shape[1])
    if found_H != H or min(shape) < 1:
        axes = f"({H}, L) or (B, {H}, L)" if layer.form.transposed else f"(L, {H}) or (B, L, {H})"
        raise ArgumentError(describe(expected=axes, got=str(u.shape), where=str(u.path)))
    return B, H, L
