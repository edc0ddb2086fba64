"""Frames through pipes: exact at every block size, nothing at block edges, the formats of impulse responses."""

from __future__ import annotations

import io
import os
import select
import struct
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import relative_error

from lowtide.errors import ArgumentError, DataError
from lowtide.nn import SGConv
from lowtide.reference.long_conv import long_conv
from lowtide.stream import layer_effect, pipe, read_wav, response_effect, save_layer


class Trickle(io.RawIOBase):
    """A pipe that hands over a few bytes at a time, never a whole frame."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self._content.read(min(size, 7))


def through(effect, frames: torch.Tensor, block: int) -> torch.Tensor:
    sink = io.BytesIO()
    assert pipe(Trickle(frames.numpy().tobytes()), sink, effect, block) == frames.shape[0]
    return torch.from_numpy(np.frombuffer(sink.getvalue(), "<f4").copy()).view(-1, effect.channels_out)


def noise(T: int, channels: int) -> torch.Tensor:
    return torch.randn(T, channels, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("block", [1, 64, 100, 4096])
@pytest.mark.parametrize("taps", [1, 40, 1000])
@pytest.mark.parametrize("channels", [1, 2])
def test_an_impulse_response(block, taps, channels):
    """2,500 frames, not a whole number of blocks; then the tail."""
    response = torch.randn(channels, taps, generator=torch.Generator().manual_seed(2)).double()
    x = noise(2500, 2)
    padded = torch.cat([x, torch.zeros(taps - 1, 2)]).T.double()
    want = long_conv(padded[None], 0.5 * response.expand(2, taps)).squeeze(0).T
    got = through(response_effect(response, 2, gain=0.5, tail=True), x, block)
    assert relative_error(got, want) < 1e-6
    assert torch.equal(through(response_effect(response, 2, gain=0.5), x, block), got[:2500])


@pytest.mark.parametrize("options", [{}, {"channels": 2, "linear": True, "transposed": False}, {"bidirectional": True}])
@pytest.mark.parametrize("block", [1, 64, 1000])
def test_a_layer(options, block):
    torch.manual_seed(0)
    layer = SGConv(3, 200, kernel_dim=16, **options).eval()
    x = noise(999, 3)
    effect = layer_effect(layer)
    assert effect.lookahead == (256 if options.get("bidirectional") else 0)
    with torch.no_grad():
        want = layer((x.T if layer.form.transposed else x)[None])[0]
    got = through(effect, x, block)
    assert relative_error(got, (want.T if layer.form.transposed else want).double()) < 1e-6


def test_a_frame_that_is_cut_short_is_said_after_the_others():
    sink = io.BytesIO()
    with pytest.raises(DataError, match="3 bytes more at the end"):
        pipe(io.BytesIO(noise(10, 2).numpy().tobytes() + b"abc"), sink, response_effect(torch.ones(1, 1), 2), 4)
    assert np.array_equal(np.frombuffer(sink.getvalue(), "<f4").reshape(-1, 2), noise(10, 2).numpy())


def test_a_response_for_other_channels_is_refused():
    with pytest.raises(ArgumentError, match="--channels 3"):
        response_effect(torch.ones(3, 5), 2)


def write_wav(path: Path, kind: int, bits: int, data: bytes, channels: int, extensible: bool = False) -> None:
    frame = channels * bits // 8
    format_ = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, 48000, 48000 * frame, frame, bits)
    if extensible:
        format_ += struct.pack("<HHIH", 22, bits, 0, kind) + b"\0" * 14
    chunks = b"LIST\x03\0\0\0abc\0" + b"fmt " + struct.pack("<I", len(format_)) + format_
    chunks += b"data" + struct.pack("<I", len(data)) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)


@pytest.mark.parametrize("extensible", [False, True])
def test_formats_of_wav(tmp_path, extensible):
    values = np.array([[0.0, -1.0, 0.5], [0.25, -0.5, 0.75]])  # exact in every format
    interleaved = values.T.ravel()
    path = tmp_path / "r.wav"
    formats = {
        (1, 8): (interleaved * 128 + 128).astype("u1").tobytes(),
        (1, 16): (interleaved * 2**15).astype("<i2").tobytes(),
        (1, 24): b"".join(int(v * 2**23).to_bytes(3, "little", signed=True) for v in interleaved),
        (1, 32): (interleaved * 2**31).astype("<i4").tobytes(),
        (3, 32): interleaved.astype("<f4").tobytes(),
        (3, 64): interleaved.astype("<f8").tobytes(),
    }
    for (kind, bits), data in formats.items():
        write_wav(path, kind, bits, data, 2, extensible)
        samples, rate = read_wav(path)
        assert np.array_equal(samples, values), (kind, bits)
        assert rate == 48000


def test_files_that_are_no_wav_are_refused(tmp_path):
    path = tmp_path / "r.wav"
    write_wav(path, 1, 16, b"\0\0" * 4, 2)
    content = path.read_bytes()
    for broken in (b"", b"RIFF", content[:30], content[:-1], content.replace(b"WAVE", b"AVI "), content[: -8 - 8]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"r\.wav"):
            read_wav(path)
    write_wav(path, 2, 4, b"\0" * 8, 2)  # compressed
    with pytest.raises(DataError, match="format 2"):
        read_wav(path)
    with pytest.raises(DataError, match="No such file"):
        read_wav(tmp_path / "absent.wav")


def test_the_command_answers_each_block_before_the_next(tmp_path):
    """With a response file as Python's own module writes it; the second block is sent when the first has come back."""
    response = np.array([16384, -8192, 4096], np.int16)
    with wave.open(str(tmp_path / "r.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(response.tobytes())
    command = [
        sys.executable,
        "-m",
        "lowtide",
        "stream",
        "pipe",
        "--response",
        "r.wav",
        "--channels",
        "2",
        "--block",
        "16",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # with it nothing would be held back, whatever the command does
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    x = noise(40, 2)
    out = b""
    for start, stop in ((0, 16), (16, 32)):
        process.stdin.write(x[start:stop].numpy().tobytes())
        process.stdin.flush()
        while len(out) < stop * 8:
            readable, _, _ = select.select([process.stdout], [], [], 60)
            assert readable, "the block was held back"
            out += os.read(process.stdout.fileno(), 4096)
        assert len(out) == stop * 8
    rest, errors = process.communicate(x[32:].numpy().tobytes(), timeout=60)
    assert errors.decode().startswith("latency 15 frames (1.88 ms at 8000 Hz)")
    assert process.returncode == 0
    got = torch.from_numpy(np.frombuffer(out + rest, "<f4").copy()).view(-1, 2)
    want = long_conv(x.T[None].double(), torch.tensor([[0.5, -0.25, 0.125]]).expand(2, 3).double())[0].T
    assert relative_error(got, want) < 1e-6


def test_the_command_with_a_saved_layer(tmp_path):
    torch.manual_seed(0)
    layer = SGConv(2, 64, kernel_dim=8).eval()
    save_layer(layer, tmp_path / "layer.pt")
    x = noise(100, 2)
    command = [sys.executable, "-m", "lowtide", "stream", "pipe", "--model", "layer.pt", "--json"]
    done = subprocess.run(command, cwd=tmp_path, input=x.numpy().tobytes(), capture_output=True, check=True)
    assert b'"latency_frames": 63' in done.stderr
    with torch.no_grad():
        want = layer(x.T[None])[0].T.double()
    assert relative_error(torch.from_numpy(np.frombuffer(done.stdout, "<f4").copy()).view(-1, 2), want) < 1e-6
