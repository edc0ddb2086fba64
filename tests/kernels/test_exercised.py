"""A run of the whole suite that leaves a provider out must fail; a run of a part need not have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exercised import LEVELS, has_compiler, levels_here, not_exercised

TESTS = Path(__file__).parents[1]
FILES = ("test_parity", "test_mix", "test_conv", "test_pool")
NATIVE = {f"tests/kernels/{name}.py::test[native-{level}-planes]" for name in FILES for level in LEVELS}
TRITON = "tests/kernels/test_triton.py::test_parity_in_the_interpreter[rows]"


@pytest.mark.parametrize("missing", [*sorted(NATIVE), TRITON])
def test_each_is_missed(missing: str) -> None:
    everything = NATIVE | {TRITON}
    assert not_exercised(everything, compiler=True, linux=True, levels=[*LEVELS]) == []
    (line,) = not_exercised(everything - {missing}, compiler=True, linux=True, levels=[*LEVELS])
    file, _, case = missing.partition("::")
    assert "Triton" in line or (file in line and f"[native-{line.rsplit(', ', 1)[1]}-" in case)


def test_what_cannot_run_is_not_asked_for() -> None:
    tensor = {"tests/kernels/test_parity.py::test[tensor-planes]"}
    assert not_exercised({TRITON} | tensor, compiler=False, linux=True, levels=[*LEVELS]) == []
    assert not_exercised(set(), compiler=False, linux=False, levels=[*LEVELS]) == []
    assert len(not_exercised({TRITON} | tensor, compiler=True, linux=True, levels=[*LEVELS])) == len(NATIVE)


SUITE = """
import pytest
@pytest.mark.parametrize("provider", {providers})
def test_pass(provider):
    if provider == "native-skipped":
        pytest.skip("no such processor")
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_a_small_suite(tmp_path: Path, workers: list[str]) -> None:
    """The hooks of tests/conftest.py around a suite whose native cases are skipped, then around a good one."""
    kernels = tmp_path / "tests" / "kernels"
    kernels.mkdir(parents=True)
    for name in ("conftest.py", "exercised.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name in FILES:
        (kernels / f"{name}.py").write_text(SUITE.format(providers=["tensor", "native-skipped"]))
    interpreter = 'import pytest\n@pytest.mark.parametrize("form", ["rows"])\n'
    (kernels / "test_triton.py").write_text(f"{interpreter}def test_parity_in_the_interpreter(form): pass\n")
    # a compiler by name is enough here, and a package by name: importing the real one takes seconds
    (tmp_path / "lowtide.py").touch()
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST_", "LOWTIDE_"))}
    environment |= {"CXX": sys.executable, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    bad = run()
    if sys.platform != "linux":
        assert (bad.returncode, has_compiler()) == (0, False)
        return
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert bad.stdout.count("but no case of tests/kernels/test_") == len(FILES) * len(levels_here()), bad.stdout
    assert run("tests/kernels/test_parity.py").returncode == 0, "a part of the suite may leave providers out"
    for name in FILES:
        providers = ["tensor", *(f"native-{level}-planes" for level in levels_here())]
        (kernels / f"{name}.py").write_text(SUITE.format(providers=providers))
    good = run()
    assert good.returncode == 0, good.stdout + good.stderr
