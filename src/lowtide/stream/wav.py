"""Impulse responses from `.wav` files: PCM of 8, 16, 24, 32 bits and IEEE floats, any number of channels."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from lowtide.errors import DataError, describe

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Samples (channels, length) in float64, integers scaled to -1..1, and the sample rate in Hz.

    Raises:
        DataError: no such file, not a RIFF/WAVE file, a compressed one, no sample, or cut short.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(describe(expected="a readable .wav file", got=error.strerror, where=str(path))) from None

    def refuse(expected: str, got: object) -> DataError:
        return DataError(describe(expected=expected, got=got, where=str(path)))

    if len(content) < 12 or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise refuse("a RIFF/WAVE file", f"a file that begins with {content[:12]!r}")
    chunks: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(content):
        name, size = content[at : at + 4], struct.unpack_from("<I", content, at + 4)[0]
        chunk = content[at + 8 : at + 8 + size]
        if len(chunk) < size and name in (b"fmt ", b"data"):
            raise refuse(f"{size} bytes in chunk {name!r}", f"{len(chunk)}: the file is cut short")
        chunks.setdefault(name, chunk)
        at += 8 + size + size % 2
    if len(chunks.get(b"fmt ", b"")) < 16 or b"data" not in chunks:
        raise refuse("chunks 'fmt ' and 'data'", sorted(name.decode("latin-1") for name in chunks))
    kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", chunks[b"fmt "])
    if kind == _EXTENSIBLE and len(chunks[b"fmt "]) >= 26:
        kind = struct.unpack_from("<H", chunks[b"fmt "], 24)[0]
    if (kind, bits) not in _READERS or channels == 0 or frame != channels * bits // 8:
        raise refuse(
            "PCM of 8, 16, 24 or 32 bits, or floats of 32 or 64", f"format {kind}, {bits} bits, {channels} channels"
        )
    data = chunks[b"data"]
    if len(data) < frame:
        raise refuse("at least one sample", f"{len(data)} bytes of data")
    samples = _READERS[kind, bits](data[: len(data) // frame * frame])
    return samples.reshape(-1, channels).T, rate


def _integers(dtype: str, scale: float, shift: float = 0.0):
    return lambda data: np.frombuffer(data, dtype).astype(np.float64) / scale - shift


def _pcm24(data: bytes) -> np.ndarray:
    low, middle, high = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32).T
    return ((low | middle << 8 | high << 16) - ((high >> 7) << 24)) / 2.0**23


_READERS = {
    (_PCM, 8): _integers("u1", 128.0, 1.0),
    (_PCM, 16): _integers("<i2", 2.0**15),
    (_PCM, 24): _pcm24,
    (_PCM, 32): _integers("<i4", 2.0**31),
    (_FLOAT, 32): lambda data: np.frombuffer(data, "<f4").astype(np.float64),
    (_FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float64),
}
