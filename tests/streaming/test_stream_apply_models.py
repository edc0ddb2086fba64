"""Whole models over a file against `forward` on the array: causal and two-sided, pools, tokens, stops, memory."""

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

from lowtide.errors import ArgumentError, DataError, UnsupportedError
from lowtide.models import SequenceModel
from lowtide.stream import apply_model, model_out_of_core
from lowtide.stream.budget import Tiles

MIB = 2**20
MODELS = {
    "causal": {},
    "two-sided, two outputs": {"bidirectional": True, "channels": 2},
    "two-sided, behind": {"bidirectional": True, "prenorm": False},
    "layer norm, glu": {"norm": "layer", "postact": "glu"},
    "power": {"decay": "power", "decay_min": 0.5},
    "mean": {"pool": "mean", "bidirectional": True},
    "last": {"pool": "last", "prenorm": False},
    "tokens": {"embedding": 11, "bidirectional": True},
}
SMALL_TILES = Tiles(channels=4, block=40, positions=60)


def make_model(dtype=torch.float64, l_max: int = 200, d_model: int = 6, **options) -> SequenceModel:
    """Two layers; norms and statistics that do something."""
    torch.manual_seed(0)
    keywords = {"pool": None, "kernel_dim": 8, **options}
    model = SequenceModel(3, 5, d_model, 2, l_max, **keywords).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model(draw(model, 8, 40))
    return model.eval()


def draw(model: SequenceModel, B: int, L: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model.tokens:
        return torch.randint(11, (B, L), generator=generator)
    return torch.randn(B, L, 3, generator=generator, dtype=torch.float64).to(model.decoder.weight.dtype)


@torch.no_grad()
def check(model: SequenceModel, folder: Path, x: torch.Tensor, tolerance: float = 1e-12) -> None:
    got = torch.from_numpy(np.load(folder / "y.npy"))
    want = model(x)
    assert got.dtype == want.dtype
    assert relative_error(got, want.double()) < tolerance


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model(tmp_path, provider, name):
    """Longer than the taps of a layer; a batch of two."""
    model = make_model(**MODELS[name])
    x = draw(model, 2, 500)
    np.save(tmp_path / "x.npy", x.numpy())
    seen = []
    done = apply_model(
        model,
        tmp_path / "x.npy",
        tmp_path / "y.npy",
        memory_bytes=26 * MIB,
        report=lambda stage, done, total: seen.append((stage, done, total)),
    )
    check(model, tmp_path, x)
    assert ("convolution 2", 12, 12) in seen
    assert ("map 1", 1000, 1000) in seen
    C, u = MODELS[name].get("channels", 1), MODELS[name].get("prenorm", True)
    assert done.scratch_bytes == (2 + C + u) * 6 * 500 * 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_one_row_and_raw_bytes(tmp_path, monkeypatch):
    model = make_model(**MODELS["tokens"])
    x = draw(model, 1, 300)
    (tmp_path / "x.txt").write_bytes(bytes(x[0].tolist()))
    np.save(tmp_path / "x.npy", x[0].to(torch.uint8).numpy())
    monkeypatch.setattr(model_out_of_core, "choose_tiles", lambda *a, **k: SMALL_TILES)
    apply_model(model, tmp_path / "x.npy", tmp_path / "y.npy")
    apply_model(model, tmp_path / "x.txt", tmp_path / "y.raw", shape=(300,))
    with torch.no_grad():
        assert relative_error(torch.from_numpy(np.load(tmp_path / "y.npy")), model(x)[0]) < 1e-12
    assert np.load(tmp_path / "y.npy").tobytes() == (tmp_path / "y.raw").read_bytes()
    raw = make_model(torch.float32)
    values = draw(raw, 1, 100)
    values.numpy().tofile(tmp_path / "x.raw")
    apply_model(raw, tmp_path / "x.raw", tmp_path / "y.npy", shape=(1, 100, 3))
    check(raw, tmp_path, values, 1e-6)


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", ["two-sided, behind", "layer norm, glu", "mean"])
def test_stopped_behind_any_tile_and_resumed(tmp_path, monkeypatch, name):
    """Tiles that were noted are not run again, others are: also those that had been written in part."""
    model = make_model(**MODELS[name])
    x = draw(model, 2, 100)
    np.save(tmp_path / "x.npy", x.numpy())
    monkeypatch.setattr(model_out_of_core, "choose_tiles", lambda *a, **k: SMALL_TILES)
    arguments = (model, tmp_path / "x.npy", tmp_path / "y.npy")
    calls: list = []
    apply_model(*arguments, report=lambda *noted: calls.append(noted))
    (tmp_path / "y.npy").unlink()
    # encoder, two blocks of convolution and map, each in two tiles; the decoder in two, a pool in one
    assert len(calls) == 2 * (2 + 2 * 4 + (1 if model.pool else 2))
    for stop in range(0, len(calls), 3):
        before: list = []

        def report(*noted, before=before, stop=stop) -> None:
            before.append(noted)
            if len(before) == stop + 1:
                raise Killed

        with pytest.raises(Killed):
            apply_model(*arguments, report=report)
        assert not (tmp_path / "y.npy").exists()
        again: list = []
        assert apply_model(*arguments, report=lambda *noted, again=again: again.append(noted)).resumed
        assert before + again == calls
        check(model, tmp_path, x)
        (tmp_path / "y.npy").unlink()


def test_a_tile_may_run_twice(tmp_path, monkeypatch):
    """A kill between the end of a tile and its note: the tile runs again over its own results."""
    from lowtide.stream.job import Stage

    monkeypatch.setattr(model_out_of_core, "choose_tiles", lambda *a, **k: SMALL_TILES)
    once = Stage.tiles
    monkeypatch.setattr(Stage, "tiles", lambda self, done: (t for tile in once(self, done) for t in (tile, tile)))
    for name in ("two-sided, behind", "layer norm, glu"):
        model = make_model(**MODELS[name])
        x = draw(model, 1, 100)
        np.save(tmp_path / "x.npy", x.numpy())
        apply_model(model, tmp_path / "x.npy", tmp_path / "y.npy")
        check(model, tmp_path, x)


def test_bad_requests_are_refused(tmp_path):
    model, tokens = make_model(), make_model(**MODELS["tokens"])
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    for shape in ((100,), (100, 4), (1, 1, 100, 3)):
        np.save(x, np.zeros(shape))
        with pytest.raises(ArgumentError, match=r"\(L, 3\) or \(B, L, 3\)"):
            apply_model(model, x, y)
    with pytest.raises(DataError, match="uint8"):
        apply_model(tokens, x, y)
    np.save(x, np.zeros((2, 3, 4), np.int64))
    with pytest.raises(ArgumentError, match=r"\(L,\) or \(B, L\)"):
        apply_model(tokens, x, y)
    with pytest.raises(DataError, match="float32"):
        apply_model(model, x, y)
    np.save(x, np.arange(20))
    with pytest.raises(DataError, match=r"tokens 0 \.\. 10.*0 \.\. 19"):
        apply_model(tokens, x, y)
    with pytest.raises(UnsupportedError, match="eval mode"):
        apply_model(make_model().train(), x, y)
    with pytest.raises(ArgumentError, match="float32 or float64"):
        apply_model(make_model(torch.bfloat16), x, y)
    assert not y.exists()


FACTORY = """
import torch
from lowtide.models import SequenceModel

def make():
    torch.manual_seed(0)
    return SequenceModel(2, 3, 48, 2, 2**15, kernel_dim=32, bidirectional=True, pool=None)
"""

HIGH_WATER = """
import ctypes, gc, sys
from pathlib import Path
import numpy as np
from lowtide.stream import apply_model
from model import make
np.save("s.npy", np.zeros((100, 2), np.float32))
apply_model(make().eval(), Path("s.npy"), Path("t.npy"))  # first use
model = make().eval()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
apply_model(model, Path("x.npy"), Path("y.npy"), memory_bytes=int(sys.argv[1]))
print(status("VmHWM") - base)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A two-sided model of 2^15 taps a layer in a file of its own, an input of (60000, 2), the model's output."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "model.py").write_text(FACTORY)
    names: dict = {}
    exec(FACTORY, names)
    model = names["make"]().eval()
    x = np.random.default_rng(1).standard_normal((60_000, 2)).astype(np.float32)
    np.save(folder / "x.npy", x)
    with torch.no_grad():
        return folder, model(torch.from_numpy(x)[None])[0].double()


def test_high_water_stays_within_the_memory(large):
    folder, want = large
    done = subprocess.run(
        [sys.executable, "-c", HIGH_WATER, str(40 * MIB)],
        cwd=folder, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    high_water = int(done.stdout)
    assert high_water <= 40 * MIB
    # the check can fail: the arrays of one layer, whole, would be more than what is allowed
    assert 40 * MIB < 4 * 48 * 60_000 * 4
    assert high_water > 4 * MIB
    assert relative_error(torch.from_numpy(np.load(folder / "y.npy")), want) < 1e-6


def test_command_killed_and_resumed(large):
    folder, want = large
    (folder / "y.npy").unlink(missing_ok=True)
    command = [sys.executable, "-m", "lowtide", "stream", "apply", "--model", "model.py:make", "--json"]
    command += ["--input", "x.npy", "--output", "y.npy", "--memory", "32MiB"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    progress = folder / "y.npy.progress"
    while not progress.exists() or json.loads(progress.read_text())["stage"] in ("encoder", "convolution 1"):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "y.npy").exists()
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["resumed"]
    assert figures["scratch_bytes"] == 4 * 48 * 60_000 * 4
    assert relative_error(torch.from_numpy(np.load(folder / "y.npy")), want) < 1e-6
