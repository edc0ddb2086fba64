"""Building the native passes: once, in silence, and again after a crash; without a compiler, one warning."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROBE = """
import lowtide, lowtide.kernels as kernels
from lowtide.kernels import build
from pathlib import Path
assert "lowtide_passes" not in Path("/proc/self/maps").read_text(), "importing lowtide loads the native passes"
build._SOURCES = Path({sources!r})
library = build.load_library()
print(library.answer())
"""
# a stand-in that compiles in a moment; the real passes are built by the parity tests
SOURCE = """
#include <ATen/Parallel.h>
extern "C" int answer() {
  int total = 0;
  at::parallel_for(0, 42, 42, [&](int64_t begin, int64_t end) { total += end - begin; });
  return total;
}
"""

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a C++ compiler (c++ on PATH)"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "passes.cpp").write_text(SOURCE)
    return folder


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def compiler_that(folder: Path, action: str) -> str:
    """A compiler's path: it does `action` before it compiles."""
    script = folder / "slow-c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *passes.o*) {action};; esac\nexec {shutil.which("c++")} "$@"\n')
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_two_processes_at_once_build_once_and_in_silence(tmp_path: Path, sources: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    compiler = compiler_that(tmp_path, f"echo build >> {log}; sleep 2")
    code = PROBE.format(sources=str(sources))
    processes = [start(code, LOWTIDE_CACHE_DIR=str(cache), CXX=compiler) for _ in range(2)]
    assert [finish(process) for process in processes] == [("42\n", "")] * 2
    assert log.read_text().count("build") == 2, "compiled and linked once, by one of the two"
    assert finish(start(code, LOWTIDE_CACHE_DIR=str(cache), CXX=compiler)) == ("42\n", "")
    assert log.read_text().count("build") == 2, "a later process finds it"


@needs_compiler
def test_build_killed_half_way_is_repaired(tmp_path: Path, sources: Path) -> None:
    started, cache = tmp_path / "started", tmp_path / "cache"
    compiler = compiler_that(tmp_path, f"test -e {started} || {{ touch {started}; sleep 600; }}")
    code = PROBE.format(sources=str(sources))
    process = start(code, LOWTIDE_CACHE_DIR=str(cache), CXX=compiler)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(cache.glob("*/build-*")), "the build was not under way"
    assert not list(cache.glob("*/*.so"))
    assert finish(start(code, LOWTIDE_CACHE_DIR=str(cache), CXX=compiler)) == ("42\n", "")
    assert not list(cache.glob("*/build-*")), "leftovers stay"


@needs_compiler
def test_damaged_library_is_built_anew(tmp_path: Path, sources: Path) -> None:
    code, cache = PROBE.format(sources=str(sources)), tmp_path / "cache"
    finish(start(code, LOWTIDE_CACHE_DIR=str(cache)))
    (library,) = cache.glob("*/lowtide_passes.so")
    library.write_bytes(library.read_bytes()[:1000])
    assert finish(start(code, LOWTIDE_CACHE_DIR=str(cache))) == ("42\n", "")


@needs_compiler
def test_other_sources_get_another_library(tmp_path: Path, sources: Path) -> None:
    code, cache = PROBE.format(sources=str(sources)), tmp_path / "cache"
    assert finish(start(code, LOWTIDE_CACHE_DIR=str(cache)))[0] == "42\n"
    (sources / "passes.cpp").write_text(SOURCE.replace("42", "43"))
    assert finish(start(code, LOWTIDE_CACHE_DIR=str(cache)))[0] == "43\n"


@needs_compiler
def test_cache_that_cannot_be_written(tmp_path: Path, sources: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.touch()
    out, err = finish(start(PROBE.format(sources=str(sources)), LOWTIDE_CACHE_DIR=str(occupied)))
    assert out == "42\n"
    assert err.count("RuntimeWarning") == 1
    assert "LOWTIDE_CACHE_DIR" in err


@needs_compiler
def test_one_openmp_runtime(tmp_path: Path) -> None:
    code = """
from pathlib import Path
import torch, lowtide.kernels as kernels
assert kernels.select(torch.zeros(1, 1, 1)).name == "native"
torch.ones(1 << 20).sum()
lines = Path("/proc/self/maps").read_text().splitlines()
print(sorted({line.split()[-1] for line in lines if "omp" in line.rsplit("/", 1)[-1]}))
"""
    out, _ = finish(start(code, LOWTIDE_KERNELS="native"))
    assert out.count(".so") == 1, f"several OpenMP runtimes compete for the cores: {out}"


WITHOUT = """
import torch, lowtide.kernels as kernels
x = torch.ones(2, 3, 5)
out = torch.empty_like(x)
for _ in range(3):
    provider = kernels.select(x)
    provider.scale_shift_act(x, torch.full((3,), 2.0), torch.ones(3), "relu", out)
print(provider.name, out.unique().tolist())
"""


@pytest.mark.parametrize("asked", ["", "native"])
def test_without_a_compiler_one_warning_and_tensor_calls(tmp_path: Path, asked: str) -> None:
    environment = {"PATH": str(tmp_path), "LOWTIDE_CACHE_DIR": str(tmp_path / "cache"), "LOWTIDE_KERNELS": asked}
    out, err = finish(start(WITHOUT, CXX="c++", **environment))
    assert out == "tensor [3.0]\n"
    assert err.count("RuntimeWarning") == 1, err
    assert "a C++ compiler" in err


@needs_compiler
def test_without_ninja_one_warning_and_tensor_calls(tmp_path: Path) -> None:
    """PATH has a compiler and nothing else, and Python lies in a folder without ninja."""
    (tmp_path / "c++").symlink_to(str(shutil.which("c++")))
    environment = {"PATH": str(tmp_path), "LOWTIDE_CACHE_DIR": str(tmp_path / "cache"), "LOWTIDE_KERNELS": ""}
    code = f"import sys; sys.executable = {str(tmp_path / 'python')!r}\n{WITHOUT}"
    out, err = finish(start(code, CXX="c++", **environment))
    assert out == "tensor [3.0]\n"
    assert err.count("RuntimeWarning") == 1, err
    assert "missing: ninja (pip install ninja)" in err


TRAINING = """
import torch
from lowtide.functional import long_conv
from lowtide.models import densenet_bc
from lowtide.nn import SGConv
torch.manual_seed(0)
model = densenet_bc(10, 4, recompute="layer")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, target = torch.randn(4, 3, 8, 8), torch.arange(4)
losses = []
for step in range(4):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
layer = SGConv(4, 32, kernel_dim=4, recompute="layer").eval()
u = torch.randn(2, 4, 32)
y = layer(u)
y.sum().backward()
state = layer.initial_state(2)
with torch.no_grad():
    streamed, _ = layer.prefill(u, state)
assert (streamed - y).norm() < 1e-5 * y.norm()
print("done")
"""


def test_everything_works_without_a_compiler(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "LOWTIDE_CACHE_DIR": str(tmp_path / "cache"), "LOWTIDE_KERNELS": ""}
    out, err = finish(start(TRAINING, CXX="c++", **environment))
    assert out == "done\n"
    assert err.count("RuntimeWarning") == 1, err


def test_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    version = 'case "$1" in -v) echo "gcc version 12" >&2; exit 0;; esac'
    broken.write_text(f'#!/bin/sh\n{version}\necho "x.cpp:1: error: no luck" >&2\nexit 1\n')
    broken.chmod(0o755)
    out, err = finish(start(WITHOUT, CXX=str(broken), LOWTIDE_CACHE_DIR=str(tmp_path / "cache"), LOWTIDE_KERNELS=""))
    assert out == "tensor [3.0]\n"
    assert err.count("RuntimeWarning") == 1, err
    assert "error: no luck" in err
