"""A sequence model over a sequence that does not fit into memory: layer by layer, each from file to file.

Between the layers the whole sequence lies in the scratch file, features by positions: the residual stream h, read by
one block and written anew for the next; behind a norm the convolution's input u; and the pre-activations p. Everything
but the convolution goes over positions, a few at a time for all features; the convolution over channels, a few at a
time for all positions. Two-sided models run as causal ones do: there is no look-ahead to wait for.

    B batch, H d_model, L length, D = channels * H
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, DataError, UnsupportedError, describe
from lowtide.models.sequence import SequenceModel
from lowtide.nn.residual import ResidualSGConv
from lowtide.stream.arrays import FLOATS, TOKENS, DiskArray, Sequence, open_array
from lowtide.stream.budget import choose_tiles
from lowtide.stream.job import Files, Stage, run_job, scratch_path, where_it_stopped
from lowtide.stream.layer_tiles import convolve, map_outputs
from lowtide.stream.out_of_core import Announce, Applied, disk_dtype, fingerprint
from lowtide.stream.progress import Report


def apply_model(
    model: SequenceModel,
    source: Path,
    target: Path,
    *,
    memory_bytes: int = 500 * 2**20,
    shape: tuple[int, ...] | None = None,
    scratch: Path | None = None,
    report: Report | None = None,
    announce: Announce | None = None,
) -> Applied:
    """model(source) -> target, in eval mode, within `memory_bytes` beside the imported libraries and the weights.

    Args:
        model: float32 or float64, on the CPU.
        source: `.npy` of (L, d_input) or (B, L, d_input) of float16, 32 or 64; for tokens (L,) or (B, L) of integers.
            With `shape` raw float32; for tokens raw bytes.
        target: `.npy` if named so, else raw; in the model's dtype: (L, d_output), with a pool (d_output,), and B in
            front as the source has it. It appears when it is complete.
        memory_bytes, report, announce: as `apply_layer`.
        scratch: folder of the scratch file, (2 H + channels * H) L numbers, with `prenorm` H L more.

    Raises:
        ArgumentError: a model, shape or memory that cannot be used.
        UnsupportedError: a model in training mode.
        DataError: files that cannot be read or written, tokens that the model does not have, or the leftovers of
            another run.
    """
    dtype = disk_dtype(model.decoder.weight)
    if model.training:
        fix = "call model.eval()"
        raise UnsupportedError(describe(expected="eval mode", got="training mode", where="stream apply", fix=fix))
    kinds, raw = (TOKENS, "uint8") if model.tokens else (FLOATS, "float32")
    with open_array(source, shape, raw, kinds) as x:
        B, L = _sizes(model, x)
        job = _ModelTiles(model, x, L)
        tiles = choose_tiles(
            job.form, model.d_model, job.maps, L, dtype.itemsize, memory_bytes, per_position=job.numbers_per_position
        )
        O = model.decoder.out_features
        row_shape = (L, O) if model.pool is None else (O,)
        folder = scratch or target.parent
        forms = [(block.layer.form, block.prenorm) for block in job.blocks]
        files = Files(
            target,
            row_shape if len(x.shape) == len(job.row_shape) else (B, *row_shape),
            dtype,
            folder,
            (job.scratch_rows, L),
            fingerprint(x, scratch_path(target, folder), (*forms, model.pool), model.state_dict()),
        )
        progress = where_it_stopped(files)
        if announce is not None:
            announce(tiles, files.scratch_bytes, progress.begun)

        def stages_of(row: int, output: DiskArray, scratch_file: DiskArray) -> list[Stage]:
            return job.stages(row, output, scratch_file, tiles.channels, tiles.block, tiles.positions)

        run_job(files, B, stages_of, progress, report or (lambda stage, done, total: None))
        return Applied(target, files.shape, tiles, files.scratch_bytes, progress.begun)


def _sizes(model: SequenceModel, x: DiskArray) -> tuple[int, int]:
    """B and L of the input file."""
    inner = () if model.tokens else (model.d_input,)
    lead = x.shape[: len(x.shape) - len(inner)]
    if x.shape[len(lead) :] != inner or len(lead) not in (1, 2) or min(x.shape) < 1:
        last = "".join(f", {size}" for size in inner)
        expected = f"(L{last or ','}) or (B, L{last})"
        raise ArgumentError(describe(expected=expected, got=str(x.shape), where=str(x.path)))
    return (1, *lead)[-2], lead[-1]


class _ModelTiles:
    """The stages of one row of the batch, and what they need."""

    def __init__(self, model: SequenceModel, x: DiskArray, L: int) -> None:
        self.model, self.x, self.L = model, x, L
        self.blocks = [block for block in model.blocks if isinstance(block, ResidualSGConv)]
        self.prenorm = self.blocks[0].prenorm
        self.form = self.blocks[0].layer.form
        output = self.blocks[0].layer.output_linear
        assert output is not None
        self.maps = output.out_features
        self.row_shape = (L,) if model.tokens else (L, model.d_input)

    @property
    def scratch_rows(self) -> int:
        return (2 + self.form.channels + self.prenorm) * self.model.d_model

    @property
    def numbers_per_position(self) -> int:
        """Beside the layer's own: the stream before and behind, its norm twice, input and output twice."""
        return 6 * self.model.d_model + 2 * (self.model.d_input + self.model.decoder.out_features)

    def stages(
        self, row: int, output: DiskArray, scratch: DiskArray, channels: int, block_length: int, positions: int
    ) -> list[Stage]:
        H, L, O = self.model.d_model, self.L, self.model.decoder.out_features
        D = self.form.channels * H
        one = len(self.x.shape) == len(self.row_shape)
        x = (self.x if one else self.x.row(row)).viewed(L, 1 if self.model.tokens else self.model.d_input)
        y = output if one else output.row(row)
        cuts = [0, H, 2 * H, 2 * H + D, scratch.shape[0]]
        h0, h1, p, u = (Sequence(scratch.rows(start, stop), True) for start, stop in itertools.pairwise(cuts))
        streams = (h0, h1)

        def encode(times: slice) -> None:
            self._leave(self._encode(x, times), 0, streams[0], u, times)

        def convolution(index: int) -> Stage:
            source, layer = u if self.prenorm else streams[index % 2], self.blocks[index].layer

            def run(features: slice) -> None:
                convolve(layer, source, p, L, features, block_length)

            return Stage(f"convolution {index + 1}", H, channels, run)

        def mapping(index: int) -> Stage:
            before, behind, block = streams[index % 2], streams[(index + 1) % 2], self.blocks[index]

            @torch.no_grad()
            def run(times: slice) -> None:
                h = _from_disk(before, H, times) + map_outputs(block.layer, p, times)
                self._leave(h if block.prenorm else block.norm(h), index + 1, behind, u, times)

            return Stage(f"map {index + 1}", L, positions, run)

        @torch.no_grad()
        def decode(times: slice) -> None:
            h = self._normed(_from_disk(streams[len(self.blocks) % 2], H, times))
            y.write(self.model.decoder(h).numpy(), times, slice(0, O))

        def pool(_: slice) -> None:
            y.viewed(1, O).write(self._pooled(streams[len(self.blocks) % 2], positions), slice(0, 1), slice(0, O))

        stages = [Stage("encoder", L, positions, encode)]
        for index in range(len(self.blocks)):
            stages += [convolution(index), mapping(index)]
        last = Stage("decoder", L, positions, decode) if self.model.pool is None else Stage("pool", 1, 1, pool)
        return [*stages, last]

    @torch.no_grad()
    def _encode(self, x: DiskArray, times: slice) -> Tensor:
        """(T, H)."""
        values = torch.from_numpy(x.read(times, slice(0, x.shape[1])))
        if not self.model.tokens:
            return self.model.encoder(values.to(self.model.decoder.weight.dtype))
        tokens, encoder = values[:, 0].long(), self.model.encoder
        assert isinstance(encoder, nn.Embedding)
        if int(tokens.min()) < 0 or int(tokens.max()) >= encoder.num_embeddings:
            expected, got = f"tokens 0 .. {encoder.num_embeddings - 1}", f"{int(tokens.min())} .. {int(tokens.max())}"
            raise DataError(describe(expected=expected, got=got, where=f"{x.path} from position {times.start} on"))
        return encoder(tokens)

    @torch.no_grad()
    def _leave(self, h: Tensor, index: int, stream: Sequence, u: Sequence, times: slice) -> None:
        """h (T, H) behind `index` blocks, for the next one: as it is, and as its convolution wants it."""
        H = slice(0, self.model.d_model)
        stream.write(h.T.numpy(), H, times)
        if self.prenorm and index < len(self.blocks):
            u.write(self.blocks[index].norm(h).T.numpy(), H, times)

    def _normed(self, h: Tensor) -> Tensor:
        return h if self.model.norm is None else self.model.norm(h)

    @torch.no_grad()
    def _pooled(self, stream: Sequence, positions: int) -> np.ndarray:
        """(1, O): the mean over the whole sequence, or its last position."""
        H, dtype = self.model.d_model, self.model.decoder.weight.dtype
        first = self.L - 1 if self.model.pool == "last" else 0
        total = torch.zeros(H, dtype=torch.float64)
        for start in range(first, self.L, positions):
            times = slice(start, min(start + positions, self.L))
            total += self._normed(_from_disk(stream, H, times)).sum(0, dtype=torch.float64)
        return self.model.decoder((total / (self.L - first)).to(dtype)).unsqueeze(0).numpy()


def _from_disk(stream: Sequence, H: int, times: slice) -> Tensor:
    """(T, H)."""
    return torch.from_numpy(stream.read(slice(0, H), times)).T
