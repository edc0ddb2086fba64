"""A two-sided layer over a file in bounded memory: how much it takes, is it right, does a killed run end the same?

Three children run `apply_layer` on the same file: one to the end; one that is killed (SIGKILL) when half of its tiles
are done; and one that goes on where that stopped, whose output must be the first one's bit for bit.

The output is then held against the plain layer in float64, and beside it the plain layer in float32 is, at every
position: the rule is error <= 2 * error of the plain layer + 4 eps, relative to the whole output's norm. Neither plain
output fits into a moderate memory: pre-activations are made a few features at a time and kept in files, the output map
goes over them a few positions at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowtide.nn import SGConv

FEATURES_AT_A_TIME = 4
POSITIONS_AT_A_TIME = 16384

# the base is what the imported libraries hold: weights, coefficients and first use of any library count as the run's
CHILD = """
import json, sys, time
from pathlib import Path
from lowtide.stream import apply_layer, load_layer

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
start = time.perf_counter()
done = apply_layer(load_layer(Path("layer.pt")), Path("x.npy"), Path(sys.argv[1]), memory_bytes=int(sys.argv[2]))
seconds = time.perf_counter() - start
figures = {"seconds": seconds, "high_water": status("VmHWM") - base, "resumed": done.resumed}
print(json.dumps(figures | vars(done.tiles)))
"""


@dataclass(frozen=True)
class Applied:
    """seconds and high_water_bytes of the run that was not killed; errors relative to the float64 output's norm."""

    seconds: float
    high_water_bytes: int
    channels: int
    error: float
    plain_error: float
    resumed_is_equal: bool
    killed_at: str

    @property
    def keeps_the_rule(self) -> bool:
        return self.error <= 2 * self.plain_error + 4 * torch.finfo(torch.float32).eps


def write_input(path: Path, features: int, length: int) -> None:
    """(features, length) normal numbers, row by row."""
    x = np.lib.format.open_memmap(path, "w+", np.float32, (features, length))
    draws = np.random.default_rng(0)
    for row in range(features):
        x[row] = draws.standard_normal(length, dtype=np.float32)
    x.flush()


def run_whole(folder: Path, memory_bytes: int) -> dict[str, float]:
    """x.npy -> y.npy by a child of its own."""
    command = [sys.executable, "-c", CHILD, "y.npy", str(memory_bytes)]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def run_killed(folder: Path, memory_bytes: int, features: int) -> str:
    """Begin x.npy -> again.npy and kill it when half of the features are convolved; where it stood."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, "again.npy", str(memory_bytes)], cwd=folder)
    progress = folder / "again.npy.progress"
    while child.poll() is None:
        noted = json.loads(progress.read_text()) if progress.exists() else {"done": 0}
        if noted["done"] >= features // 2:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            assert not (folder / "again.npy").exists()
            return f"{noted['stage']} {noted['done']}"
        time.sleep(0.02)
    raise RuntimeError(f"the run ended (exit code {child.returncode}) before it could be killed")


def run_resumed(folder: Path, memory_bytes: int) -> bool:
    """The killed run goes on; is its output the other one's, bit for bit?"""
    command = [sys.executable, "-c", CHILD, "again.npy", str(memory_bytes)]
    done = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    assert done["resumed"]
    same = True
    with (folder / "y.npy").open("rb") as one, (folder / "again.npy").open("rb") as other:
        while (a := one.read(2**24)) or other.read(1):
            same = same and a == other.read(len(a))
    return same


@torch.no_grad()
def write_plain(layer: SGConv, folder: Path, dtype: torch.dtype) -> Path:
    """The pre-activations of the plain layer (channels 1) in `dtype`, into a file of the shape of x.npy."""
    u = np.load(folder / "x.npy", mmap_mode="r")
    path = folder / f"plain_{dtype}.npy".replace("torch.", "")
    out = np.lib.format.open_memmap(path, "w+", torch.empty(0, dtype=dtype).numpy().dtype, u.shape)
    for start in range(0, u.shape[0], FEATURES_AT_A_TIME):
        features = slice(start, min(start + FEATURES_AT_A_TIME, u.shape[0]))
        width, kernel = features.stop - start, layer.form.kernel
        narrow = SGConv(
            width, layer.l_max, kernel_dim=kernel.kernel_dim, bidirectional=True, linear=True, recompute="none"
        ).eval()
        for mine, whole in zip(narrow.kernel_list, layer.kernel_list, strict=True):
            mine.copy_(whole[:, features])
        narrow.D.copy_(layer.D[:, features])
        narrow.kernel_norm.copy_(layer.kernel_norm[:, features])
        narrow.multiplier.copy_(layer.multiplier[:, features])
        rows = torch.from_numpy(np.array(u[features])).to(dtype)
        out[features] = narrow.to(dtype)(rows[None])[0].numpy()
    out.flush()
    return path


def mapped(layer: SGConv, path: Path, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """(H, positions) after positions: activation and output map of the pre-activations in a file, in float64 after."""
    p = np.load(path, mmap_mode="r")
    assert layer.output_linear is not None
    weight, bias = layer.output_linear.weight.detach().to(dtype), layer.output_linear.bias.detach().to(dtype)
    for start in range(0, p.shape[1], POSITIONS_AT_A_TIME):
        rows = torch.from_numpy(np.array(p[:, start : start + POSITIONS_AT_A_TIME]))
        yield (weight @ torch.nn.functional.gelu(rows) + bias.view(-1, 1)).double()


def errors(layer: SGConv, folder: Path) -> tuple[float, float]:
    """Relative errors of y.npy and of the plain layer in float32, at every position."""
    wanted, plain = (write_plain(layer, folder, dtype) for dtype in (torch.float64, torch.float32))
    y = np.load(folder / "y.npy", mmap_mode="r")
    ours = theirs = norm = 0.0
    parts = zip(mapped(layer, wanted, torch.float64), mapped(layer, plain, torch.float32), strict=True)
    for index, (want, other) in enumerate(parts):
        start = index * POSITIONS_AT_A_TIME
        got = torch.from_numpy(np.array(y[:, start : start + POSITIONS_AT_A_TIME])).double()
        ours += (got - want).square().sum().item()
        theirs += (other - want).square().sum().item()
        norm += want.square().sum().item()
    assert norm > 0
    return (ours / norm) ** 0.5, (theirs / norm) ** 0.5


def measure(layer: SGConv, folder: Path, features: int, length: int, memory_bytes: int) -> Applied:
    """All of it, in a folder with room for seven files of the input's size."""
    write_input(folder / "x.npy", features, length)
    whole = run_whole(folder, memory_bytes)
    killed_at = run_killed(folder, memory_bytes, features)
    equal = run_resumed(folder, memory_bytes)
    error, plain_error = errors(layer, folder)
    return Applied(
        whole["seconds"], int(whole["high_water"]), int(whole["channels"]), error, plain_error, equal, killed_at
    )
