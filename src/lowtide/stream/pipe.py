"""Frames through an effect: float32 in, float32 out, each block written before the next is read."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import DataError, describe
from lowtide.stream.effects import Effect

FLOAT_BYTES = 4


def pipe(source: BinaryIO, sink: BinaryIO, effect: Effect, block: int) -> int:
    """Copy `source` to `sink` through `effect`, `block` frames at a time; returns the number of input frames.

    Frames are interleaved little-endian float32. The latency is fixed: block - 1 frames until a block is full, and the
    effect's look-ahead. A last block that is not full is processed as it is: as many frames come out as went in.

    Raises:
        DataError: the input ends inside a frame; all whole frames have been written.
    """
    frame_bytes = effect.channels_in * FLOAT_BYTES
    frames = 0
    while True:
        content = _read_exactly(source, block * frame_bytes)
        count = len(content) // frame_bytes
        if count:
            values = np.frombuffer(content, "<f4", count * effect.channels_in).reshape(count, effect.channels_in)
            _write(sink, effect.process(torch.from_numpy(values.astype(np.float32))))
            frames += count
        if len(content) < block * frame_bytes:
            break
    _write(sink, effect.finish())
    if len(content) % frame_bytes:
        expected = f"whole frames of {effect.channels_in} float32 numbers ({frame_bytes} bytes)"
        raise DataError(
            describe(expected=expected, got=f"{len(content) % frame_bytes} bytes more at the end", where="pipe")
        )
    return frames


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    """`size` bytes, fewer only at the end: a pipe hands over what it has."""
    parts: list[bytes] = []
    missing = size
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _write(sink: BinaryIO, frames: Tensor) -> None:
    if frames.shape[0]:
        sink.write(frames.contiguous().numpy().astype("<f4", copy=False).tobytes())
        sink.flush()
