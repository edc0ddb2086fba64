"""`lowtide stream apply` and `lowtide stream pipe`: long convolutions over large files, and live."""

from __future__ import annotations

import json as json_format
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowtide.errors import ArgumentError, CheckpointError, describe
from lowtide.measure.units import format_bytes, format_seconds, parse_bytes
from lowtide.models import SequenceModel
from lowtide.models.resolve import resolve_model
from lowtide.nn import SGConv
from lowtide.stream import apply_layer, apply_model, layer_effect, load_layer, read_wav, response_effect
from lowtide.stream import pipe as pipe_frames
from lowtide.stream.arrays import parse_shape
from lowtide.stream.budget import Tiles
from lowtide.train.sgconv import load_trained


def apply(
    *,
    model: str,
    input: Path,
    output: Path,
    memory: str = "500MiB",
    shape: str | None = None,
    scratch: Path | None = None,
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Run a layer or a model over a file, in bounded memory; a run that was killed goes on when it is started again.

    Args:
        model: A layer saved by lowtide.stream.save_layer (.pt); a folder or checkpoint of lowtide train sgconv; or
            module:factory or file.py:factory of an SGConv or a SequenceModel.
        input: .npy of (H, L) or (B, H, L) for a layer, (L, d_input) or (B, L, d_input) for a model, integers (L,) or
            (B, L) for a model of tokens; or raw float32 (tokens: bytes) with --shape.
        output: .npy if named so, else raw; it appears when it is complete.
        memory: Bound for the arrays at work, beside the imported libraries and the weights.
        shape: Of a raw input, as 256x1000000.
        scratch: Folder of the scratch file (channels * H * L numbers; of a model up to 3 H L more); the output's by
            default.
        threads: Of torch; all cores by default.
        json: Print one line of JSON at the end and no bar.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if scratch is not None and not scratch.is_dir():
        raise ArgumentError(describe(expected="an existing folder", got=str(scratch), where="--scratch"))
    network = _network(model)
    console = Console(stderr=True, quiet=json)
    start = time.perf_counter()

    def announce(tiles: Tiles, scratch_bytes: int, resumed: bool) -> None:
        if resumed:
            console.print("going on where an earlier run stopped")
        console.print(
            f"{tiles.channels} channels at a time, then {tiles.positions} positions; "
            f"scratch file {format_bytes(scratch_bytes)}"
        )

    bar = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=json,
    )
    with bar:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        run = partial(apply_layer, network) if isinstance(network, SGConv) else partial(apply_model, network)
        done = run(
            input,
            output,
            memory_bytes=parse_bytes(memory, "--memory"),
            shape=None if shape is None else parse_shape(shape),
            scratch=scratch,
            report=report,
            announce=announce,
        )
    seconds = time.perf_counter() - start
    if json:
        figures = {
            "shape": done.shape,
            "scratch_bytes": done.scratch_bytes,
            "resumed": done.resumed,
            "seconds": seconds,
        }
        print(json_format.dumps({"output": str(done.output)} | figures | vars(done.tiles)))
        return
    console.print(f"{done.output} {'x'.join(map(str, done.shape))} in {format_seconds(seconds)}")


def pipe(
    *,
    model: str | None = None,
    response: Path | None = None,
    channels: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None,
    block: int = 64,
    gain: float = 1.0,
    tail: bool = False,
    threads: int = 1,
    json: bool = False,
) -> None:
    """Read float32 frames from standard input, write as many to standard output, with a fixed latency.

    Frames are interleaved little-endian float32. The first line on standard error states the latency.

    Args:
        model: A layer saved by lowtide.stream.save_layer (.pt), or module:factory or file.py:factory of one.
        response: A .wav impulse response, instead of a model.
        channels: Channels of the frames; the response's by default. A response of one channel serves all.
        block: Frames at a time.
        gain: Factor on the impulse response.
        tail: Let the response die away when the input has ended: its length - 1 frames more.
        threads: Of torch; one answers soonest.
        json: State the latency as a line of JSON.
    """
    if (model is None) == (response is None):
        got = "both" if model is not None else "neither"
        raise ArgumentError(describe(expected="either --model or --response", got=got, where="stream pipe"))
    if block < 1:
        raise ArgumentError(describe(expected="--block >= 1", got=str(block), where="stream pipe"))
    if channels is not None and channels < 1:
        raise ArgumentError(describe(expected="--channels >= 1", got=str(channels), where="stream pipe"))
    torch.set_num_threads(threads)
    rate = None
    if model is not None:
        effect = layer_effect(_layer(model))
        if channels not in (None, effect.channels_in):
            expected, got = f"--channels {effect.channels_in}, as the model has", str(channels)
            raise ArgumentError(describe(expected=expected, got=got, where="stream pipe"))
    else:
        assert response is not None
        samples, rate = read_wav(response)
        effect = response_effect(torch.from_numpy(samples.copy()), channels or samples.shape[0], gain, tail)
    latency = block - 1 + effect.lookahead
    if json:
        figures = {"latency_frames": latency, "channels_in": effect.channels_in, "channels_out": effect.channels_out}
        stated = json_format.dumps(figures | {"block": block, "rate": rate})
    else:
        in_time = "" if rate is None else f" ({format_seconds(latency / rate)} at {rate} Hz)"
        shape = f"{effect.channels_in} -> {effect.channels_out} channels"
        stated = f"latency {latency} frames{in_time}, {shape}, blocks of {block}"
    print(stated, file=sys.stderr, flush=True)
    pipe_frames(sys.stdin.buffer, sys.stdout.buffer, effect, block)


def _layer(model: str) -> SGConv:
    if _is_layer_file(model):
        return load_layer(Path(model))
    found, _ = resolve_model(model)
    if not isinstance(found, SGConv):
        raise ArgumentError(describe(expected="an SGConv layer", got=type(found).__name__, where=model))
    return found.eval()


def _network(model: str) -> SGConv | SequenceModel:
    path = Path(model)
    if path.is_dir():
        return load_trained(path, "cpu").model
    if _is_layer_file(model):
        try:
            return load_layer(path)
        except CheckpointError:
            if not path.is_file():
                raise
            return load_trained(path, "cpu").model  # the other kind of file that lowtide writes
    found, _ = resolve_model(model)
    if not isinstance(found, SGConv | SequenceModel):
        expected = "an SGConv layer or a SequenceModel"
        raise ArgumentError(describe(expected=expected, got=type(found).__name__, where=model))
    return found.eval()


def _is_layer_file(model: str) -> bool:
    return model.endswith((".pt", ".pth")) and ":" not in model
