"""An SGConv layer over a sequence that does not fit into memory: channels in, time tiles out.

First the convolution with its skip term, a few channels at a time over the whole sequence: nothing but the state of a
stream stays in memory, and a two-sided layer's reverse kernels stream from the end to the beginning. The pre-activation
goes to a scratch file. Then activation, norm and output map, a few positions at a time for all channels.

A tile is on the disk before it is noted as done, so a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import ArgumentError, DataError, describe
from lowtide.functional import StreamFilter, sgconv_map, stream_block_rows, stream_filter, stream_state
from lowtide.nn import SGConv
from lowtide.stream.arrays import DiskArray, Sequence, open_array, scratch_array
from lowtide.stream.budget import Tiles, choose_tiles
from lowtide.stream.progress import Progress, Report, Stage, read_progress

DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


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
    announce: Callable[[Tiles, int, bool], None] | None = None,
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
    where = "stream apply"
    if layer.D.dtype not in DTYPES or layer.D.device.type != "cpu":
        got = f"{layer.D.dtype} on {layer.D.device}"
        raise ArgumentError(describe(expected="a float32 or float64 layer on the CPU", got=got, where=where))
    with open_array(source, shape) as u:
        B, H, L = _sizes(layer, u)
        maps = 0 if layer.output_linear is None else layer.output_linear.out_features
        tiles = choose_tiles(layer.form, H, maps, L, DTYPES[layer.D.dtype].itemsize, memory_bytes)
        job = _Job(layer, u, target, (B, H, L), tiles, scratch or target.parent)
        progress = read_progress(job.progress_path, job.fingerprint())
        resumed = progress != Progress(progress.run)
        if announce is not None:
            announce(tiles, job.scratch_bytes, resumed)
        job.run(progress, report or (lambda stage, done, total: None))
        return Applied(target, job.output_shape, tiles, job.scratch_bytes, resumed)


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


def _outputs(layer: SGConv) -> int:
    """Features of the output."""
    return layer.form.channels * layer.D.shape[1] if layer.output_linear is None else layer.D.shape[1]


class _Job:
    """One run: its files, and the two stages for each row of the batch."""

    def __init__(
        self, layer: SGConv, u: DiskArray, target: Path, sizes: tuple[int, int, int], tiles: Tiles, folder: Path
    ) -> None:
        self.layer, self.u, self.target, self.tiles = layer, u, target, tiles
        self.B, self.H, self.L = sizes
        self.dtype = DTYPES[layer.D.dtype]
        self.D, self.O = layer.form.channels * self.H, _outputs(layer)
        self.time_last = layer.form.transposed
        self.output_path = target.with_name(f"{target.name}.partial")
        self.progress_path = target.with_name(f"{target.name}.progress")
        self.scratch_path = folder / f"{target.name}.scratch"

    @property
    def output_shape(self) -> tuple[int, ...]:
        row = (self.O, self.L) if self.time_last else (self.L, self.O)
        return row if len(self.u.shape) == 2 else (self.B, *row)

    @property
    def scratch_bytes(self) -> int:
        return 0 if self.layer.form.linear else self.D * self.L * self.dtype.itemsize

    def fingerprint(self) -> str:
        """Tells this run from one with another input, other weights or other options."""
        about = os.fstat(self.u.file)
        run = hashlib.sha256()
        for part in (
            self.u.path.resolve(),
            self.u.shape,
            about.st_size,
            about.st_mtime_ns,
            self.scratch_path.resolve(),
        ):
            run.update(repr(part).encode())
        run.update(repr(self.layer.form).encode())
        for name, tensor in self.layer.state_dict().items():
            run.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return run.hexdigest()

    def run(self, progress: Progress, report: Report) -> None:
        npy = self.target.suffix == ".npy"
        if progress != Progress(progress.run):
            self._check_leftovers()
        with ExitStack() as stack:
            output = stack.enter_context(scratch_array(self.output_path, self.output_shape, self.dtype, npy=npy))
            scratch = output
            if not self.layer.form.linear:
                scratch = stack.enter_context(scratch_array(self.scratch_path, (self.D, self.L), self.dtype))
            for row in range(progress.row, self.B):
                u, y = (
                    Sequence(array if len(array.shape) == 2 else array.row(row), self.time_last)
                    for array in (self.u, output)
                )
                p = y if self.layer.form.linear else Sequence(scratch, True)
                for stage, tile, done in self._tiles(progress):
                    if stage == "convolution":
                        self._convolve(u, p, tile)
                        p.array.flush()
                    else:
                        self._map(p, y, tile)
                        y.array.flush()
                    progress = Progress(progress.run, row, stage, done)
                    progress.write(self.progress_path)
                    size = self.H if stage == "convolution" else self.L
                    report(stage, row * size + done, self.B * size)
                progress = Progress(progress.run, row + 1)
                progress.write(self.progress_path)
        # in this order: a run that is killed between any two of them begins anew, and never trusts a file that is gone
        self.progress_path.unlink()
        self.scratch_path.unlink(missing_ok=True)
        os.replace(self.output_path, self.target)

    def _check_leftovers(self) -> None:
        for path in (self.output_path,) if self.layer.form.linear else (self.output_path, self.scratch_path):
            if not path.exists():
                fix = f"delete {self.progress_path} to begin anew"
                expected = "what the earlier run has written so far"
                raise DataError(describe(expected=expected, got="no such file", where=str(path), fix=fix))

    def _tiles(self, progress: Progress) -> Iterator[tuple[Stage, slice, int]]:
        """What is left of a row: (stage, channels or positions, how many of them are done behind it)."""
        if progress.stage == "convolution":
            for start in range(progress.done, self.H, self.tiles.channels):
                stop = min(start + self.tiles.channels, self.H)
                yield "convolution", slice(start, stop), stop
        if not self.layer.form.linear:
            for start in range(progress.done if progress.stage == "map" else 0, self.L, self.tiles.positions):
                stop = min(start + self.tiles.positions, self.L)
                yield "map", slice(start, stop), stop

    def _convolve(self, u: Sequence, p: Sequence, features: slice) -> None:
        """Convolution and skip of some features over the whole row, whatever p holds there before."""
        filter = self._filter(features, reverse=False)
        state = stream_state(filter, 1)
        for start in range(0, self.L, self.tiles.block):
            times = slice(start, min(start + self.tiles.block, self.L))
            self._write(p, stream_block_rows(self._read(u, features, times), state, filter), features, times)
        if not self.layer.form.bidirectional:
            return
        filter = self._filter(features, reverse=True)
        state = stream_state(filter, 1)
        last = torch.zeros(1, 1, self.layer.form.channels, features.stop - features.start, dtype=self.layer.D.dtype)
        for stop in range(self.L, 0, -self.tiles.block):
            times = slice(max(0, stop - self.tiles.block), stop)
            ahead = stream_block_rows(self._read(u, features, times).flip(0), state, filter)
            # reverse tap j has lag -(j+1): an output takes what streamed up to the sample behind it
            self._write(p, torch.cat([last, ahead[:-1]]).flip(0), features, times, add=True)
            last = ahead[-1:].clone()

    def _filter(self, features: slice, *, reverse: bool) -> StreamFilter:
        layer, C = self.layer, self.layer.form.channels
        rows = slice(C, 2 * C) if reverse else slice(0, C)
        return stream_filter(
            [piece.detach()[rows, features] for piece in layer.kernel_list],
            layer.multiplier if layer.multiplier.dim() == 0 else layer.multiplier[:, features],
            None if layer.decay is None else layer.decay.detach()[features],
            layer.kernel_norm[rows, features],
            None if reverse else layer.D.detach()[:, features],
            form=layer.form.kernel,
        )

    def _read(self, u: Sequence, features: slice, times: slice) -> Tensor:
        """(T, 1, features)."""
        return torch.from_numpy(u.read(features, times).T.astype(self.dtype, order="C")).unsqueeze(1)

    def _write(self, p: Sequence, y: Tensor, features: slice, times: slice, *, add: bool = False) -> None:
        """y (T, 1, C, features) to the rows c * H + features of p."""
        for c, values in enumerate(y.squeeze(1).unbind(1)):
            rows = slice(c * self.H + features.start, c * self.H + features.stop)
            part = values.T.numpy()
            p.write(part + p.read(rows, times) if add else part, rows, times)

    def _map(self, p: Sequence, y: Sequence, times: slice) -> None:
        layer = self.layer
        assert layer.output_linear is not None
        rows = torch.from_numpy(p.read(slice(0, self.D), times)).T.unsqueeze(1)
        norm, output = layer.norm, layer.output_linear
        norm_weight, norm_bias = (None, None) if norm is None else (norm.weight, norm.bias)
        form = replace(layer.form, transposed=False)
        mapped = sgconv_map(rows, output.weight, output.bias, norm_weight, norm_bias, form=form)
        y.write(mapped.squeeze(1).T.numpy(), slice(0, self.O), times)
