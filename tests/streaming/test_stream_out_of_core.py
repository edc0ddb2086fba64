"""A layer over a file against the layer called on the array; killed half-way; within its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import relative_error

from lowtide.errors import ArgumentError, CheckpointError, DataError
from lowtide.nn import SGConv
from lowtide.stream import apply_layer, load_layer, save_layer
from lowtide.stream.budget import choose_tiles

MIB = 2**20


def make_layer(H: int = 5, L: int = 600, dtype=torch.float64, **options) -> SGConv:
    torch.manual_seed(0)
    return SGConv(H, L, **{"kernel_dim": 8, **options}).to(dtype).eval()


def save_input(path: Path, *shape: int, dtype=np.float64) -> torch.Tensor:
    values = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    np.save(path, values)
    return torch.from_numpy(values)


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "lowtide", "stream", *arguments], capture_output=True, **options)


LAYERS = {
    "causal": {},
    "two-sided, two outputs": {"bidirectional": True, "channels": 2},
    "glu, norm": {"postact": "glu", "norm": True},
    "linear, two-sided": {"linear": True, "channels": 2, "bidirectional": True},
    "rows": {"transposed": False, "bidirectional": True},
    "linear rows": {"transposed": False, "linear": True},
    "power": {"decay": "power", "decay_min": 0.5, "bidirectional": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_layer(tmp_path, provider, name):
    layer = make_layer(**LAYERS[name])
    shape = (2, 5, 700) if layer.form.transposed else (2, 700, 5)
    u = save_input(tmp_path / "x.npy", *shape)
    seen = []
    done = apply_layer(
        layer,
        tmp_path / "x.npy",
        tmp_path / "y.npy",
        memory_bytes=26 * MIB,
        report=lambda stage, done, total: seen.append((stage, done, total)),
    )
    with torch.no_grad():
        want = layer(u)
    got = torch.from_numpy(np.load(tmp_path / "y.npy"))
    assert done.shape == tuple(want.shape)
    assert relative_error(got, want) < 1e-12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "y.npy"]
    assert ("convolution", 10, 10) in seen
    assert (("map", 1400, 1400) in seen) != layer.form.linear
    assert done.scratch_bytes == (0 if layer.form.linear else layer.form.channels * 5 * 700 * 8)


def test_one_row_without_a_batch_and_raw_numbers(tmp_path):
    layer = make_layer(dtype=torch.float32)
    u = save_input(tmp_path / "x.npy", 5, 300, dtype=np.float32)
    u.numpy().tofile(tmp_path / "x.raw")
    apply_layer(layer, tmp_path / "x.npy", tmp_path / "y.npy")
    apply_layer(layer, tmp_path / "x.raw", tmp_path / "y.raw", shape=(5, 300))
    with torch.no_grad():
        want = layer(u[None])[0]
    got = np.load(tmp_path / "y.npy")
    assert relative_error(torch.from_numpy(got), want.double()) < 1e-6
    assert got.tobytes() == (tmp_path / "y.raw").read_bytes()


def test_small_tiles_give_the_same(tmp_path, monkeypatch):
    """Blocks of 7 samples, 2 channels and 11 positions at a time."""
    from lowtide.stream import out_of_core
    from lowtide.stream.budget import Tiles

    layer = make_layer(bidirectional=True)
    u = save_input(tmp_path / "x.npy", 5, 100)
    monkeypatch.setattr(out_of_core, "choose_tiles", lambda *a: Tiles(channels=2, block=7, positions=11))
    apply_layer(layer, tmp_path / "x.npy", tmp_path / "y.npy")
    with torch.no_grad():
        assert relative_error(torch.from_numpy(np.load(tmp_path / "y.npy")), layer(u[None])[0]) < 1e-12


class Killed(Exception):
    pass


@pytest.mark.parametrize("when", range(8))
def test_stopped_behind_each_tile_and_resumed(tmp_path, monkeypatch, when):
    from lowtide.stream import out_of_core
    from lowtide.stream.budget import Tiles

    layer = make_layer(bidirectional=True)
    u = save_input(tmp_path / "x.npy", 2, 5, 100)
    monkeypatch.setattr(out_of_core, "choose_tiles", lambda *a: Tiles(channels=3, block=40, positions=60))
    calls = []

    def report(stage: str, done: int, total: int) -> None:
        calls.append((stage, done))
        if len(calls) == when + 1:
            raise Killed

    arguments = (layer, tmp_path / "x.npy", tmp_path / "y.npy")
    with pytest.raises(Killed):
        apply_layer(*arguments, report=report)
    assert not (tmp_path / "y.npy").exists()
    # what an unfinished tile left behind does not matter: damage what is not noted as done
    again = []
    done = apply_layer(*arguments, report=lambda stage, done, total: again.append((stage, done)))
    assert done.resumed
    assert len(calls) + len(again) == 8
    with torch.no_grad():
        assert relative_error(torch.from_numpy(np.load(tmp_path / "y.npy")), layer(u)) < 1e-12


def test_leftovers_of_another_run_are_refused(tmp_path):
    layer = make_layer()
    save_input(tmp_path / "x.npy", 5, 100)
    arguments = (tmp_path / "x.npy", tmp_path / "y.npy")

    def stop(stage: str, done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        apply_layer(layer, *arguments, report=stop)
    with pytest.raises(DataError, match="another input, model or options"):
        apply_layer(make_layer(bidirectional=True), *arguments)
    (tmp_path / "y.npy.scratch").unlink()
    with pytest.raises(DataError, match=r"y.npy.scratch.*no such file"):
        apply_layer(layer, *arguments)
    (tmp_path / "y.npy.progress").unlink()
    assert not apply_layer(layer, *arguments).resumed


def test_bad_requests_are_refused_before_anything_is_written(tmp_path):
    layer = make_layer()
    save_input(tmp_path / "x.npy", 4, 100)
    with pytest.raises(ArgumentError, match=r"\(5, L\) or \(B, 5, L\)"):
        apply_layer(layer, tmp_path / "x.npy", tmp_path / "y.npy")
    save_input(tmp_path / "x.npy", 5, 100)
    with pytest.raises(ArgumentError, match=r"at least .*one channel"):
        apply_layer(layer, tmp_path / "x.npy", tmp_path / "y.npy", memory_bytes=1000)
    with pytest.raises(ArgumentError, match="float32 or float64"):
        apply_layer(make_layer(dtype=torch.bfloat16), tmp_path / "x.npy", tmp_path / "y.npy")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_a_saved_layer_comes_back(tmp_path):
    for name, options in LAYERS.items():
        layer = make_layer(tie_dropout=True, dropout=0.25, **options)
        save_layer(layer, tmp_path / "layer.pt")
        loaded = load_layer(tmp_path / "layer.pt")
        assert loaded.form == layer.form, name
        shape = (1, 5, 50) if layer.form.transposed else (1, 50, 5)
        u = torch.randn(shape, dtype=torch.float64)
        with torch.no_grad():
            assert torch.equal(loaded(u), layer(u))
    (tmp_path / "other.pt").write_bytes(b"not a layer")
    torch.save({"model": {}}, tmp_path / "model.pt")
    for name in ("other.pt", "model.pt", "absent.pt"):
        with pytest.raises(CheckpointError, match=name):
            load_layer(tmp_path / name)


@pytest.mark.parametrize("memory_mib", [130, 500, 4000])
def test_tiles_grow_with_the_memory_and_are_bounded_by_it(provider, memory_mib):
    layer = SGConv(256, 1_000_000, kernel_dim=32)
    tiles = choose_tiles(layer.form, 256, 256, 1_000_000, 4, memory_mib * MIB)
    more = choose_tiles(layer.form, 256, 256, 1_000_000, 4, 2 * memory_mib * MIB)
    assert 1 <= tiles.channels <= more.channels <= 64
    assert 1 <= tiles.positions <= more.positions
    # the rings of the inputs, and a tile of pre-activations: alone already a part of the memory
    assert tiles.channels * layer.form.kernel.taps * 4 < memory_mib * MIB
    assert tiles.positions * 256 * 4 < memory_mib * MIB
    # and no needless smallness: four times the tiles would not fit, or are all there is
    assert more.channels > tiles.channels or tiles.channels == 64


@pytest.fixture
def large(tmp_path):
    """A two-sided layer of 2^17 taps, its file, an input of (16, 200000), and the layer's output."""
    layer = make_layer(16, 2**17, torch.float32, kernel_dim=32, bidirectional=True)
    save_layer(layer, tmp_path / "layer.pt")
    u = save_input(tmp_path / "x.npy", 16, 200_000, dtype=np.float32)
    with torch.no_grad():
        want = layer(u[None])[0].double()
    return tmp_path, want


def test_command_killed_and_resumed(large):
    folder, want = large
    arguments = ["apply", "--model", "layer.pt", "--input", "x.npy", "--output", "y.npy", "--memory", "32MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "stream", *arguments, "--json"], cwd=folder, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    progress = folder / "y.npy.progress"
    while not progress.exists():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "y.npy").exists()
    noted = json.loads(progress.read_text())
    assert noted["done"] > 0
    done = run(*arguments, "--json", cwd=folder, check=True)
    figures = json.loads(done.stdout)
    assert figures["resumed"]
    assert figures["scratch_bytes"] == 16 * 200_000 * 4
    assert relative_error(torch.from_numpy(np.load(folder / "y.npy")), want) < 1e-6
    assert sorted(p.name for p in folder.iterdir()) == ["layer.pt", "x.npy", "y.npy"]


HIGH_WATER = """
import ctypes, gc, sys
from pathlib import Path
import lowtide.stream, torch
from lowtide.stream import apply_layer, load_layer
layer = load_layer(Path("layer.pt"))
lowtide.stream.apply_layer(load_layer(Path("small.pt")), Path("s.npy"), Path("t.npy"))  # first use
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
tiles = apply_layer(layer, Path("x.npy"), Path("y.npy"), memory_bytes=int(sys.argv[1])).tiles
print(tiles.channels, status("VmHWM") - base)
"""


@pytest.mark.parametrize("memory_mib", [40, 90])
def test_high_water_stays_within_the_memory(large, provider, memory_mib):
    folder, want = large
    save_layer(make_layer(2, 100, torch.float32), folder / "small.pt")
    save_input(folder / "s.npy", 2, 100)
    done = subprocess.run(
        [sys.executable, "-c", HIGH_WATER, str(memory_mib * MIB)],
        cwd=folder, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    channels, high_water = map(int, done.stdout.split())
    assert high_water <= memory_mib * MIB
    # the check can fail: the state of the tiles it took is a good part of the memory
    if provider == "native":
        assert high_water >= channels * 2**17 * 4
    assert relative_error(torch.from_numpy(np.load(folder / "y.npy")), want) < 1e-6


def test_one_state_at_a_time(tmp_path, monkeypatch):
    """Where states are nearly all of the memory: 2^19 taps, both directions, several tiles of channels."""
    monkeypatch.setenv("LOWTIDE_KERNELS", "native")
    save_layer(make_layer(32, 2**19, torch.float32, kernel_dim=32, bidirectional=True), tmp_path / "layer.pt")
    save_layer(make_layer(2, 100, torch.float32), tmp_path / "small.pt")
    save_input(tmp_path / "s.npy", 2, 100)
    save_input(tmp_path / "x.npy", 32, 20_000, dtype=np.float32)
    done = subprocess.run(
        [sys.executable, "-c", HIGH_WATER, str(64 * MIB)],
        cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    channels, high_water = map(int, done.stdout.split())
    assert channels < 32
    state_bytes = channels * 2**19 * 4
    assert state_bytes <= high_water < 2 * state_bytes


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    for arguments in (
        ["apply", "--model", "absent.pt", "--input", "x.npy", "--output", "y.npy"],
        ["apply", "--model", "absent.pt", "--input", "x.npy", "--output", "y.npy", "--memory", "lots"],
        ["pipe"],
        ["pipe", "--response", "absent.wav"],
    ):
        done = run(*arguments, cwd=tmp_path, text=True)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
