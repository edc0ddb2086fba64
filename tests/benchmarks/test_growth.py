"""The sweep over sizes, from the command to the drawing."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import growth
import machine
import plots
import pytest

BENCHMARKS = Path(growth.__file__).parent


def points(power: float) -> list[growth.Figure]:
    return [
        growth.Figure(case, name, x, x**power * 1e-3, 0.0, 1.0, int(2**20 * x**power), int(2**19 * x**power), 5)
        for case in ("depth", "length")
        for name in ("plain", "lowtide layer")
        for x in (16, 64, 256)
    ]


def test_exponent_of_a_power_law() -> None:
    for power in (1.0, 1.5, 2.0):
        assert plots.exponent([1, 4, 16], [x**power for x in (1, 4, 16)]) == pytest.approx(power)


def test_drawing_shows_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "growth-x.csv", tmp_path / "growth.svg"
    about = machine.machine()
    machine.write_csv(path, points(2.0), about, "command")
    figure = plots.draw(path)
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert [line.get_label().split("^")[1] for line in axes.get_lines()] == ["2.00", "2.00"]
        (x, y) = axes.get_lines()[0].get_data()
        assert list(x) == [16, 64, 256]
        assert math.isclose(y[2] / y[0], 256)
    monkeypatch.setattr(sys, "argv", ["plots.py", "--csv", str(path), "--out", str(out)])
    plots.main()
    first = out.read_bytes()
    assert plots.source(path) in first.decode()
    plots.main()
    assert out.read_bytes() == first, "the same rows give the same file"
    machine.write_csv(path, points(1.0), about, "command")
    assert plots.source(path) not in first.decode()


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "growth", "--only", "length", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4096" in done.stdout
    assert "lowtide layer" in done.stdout
    assert list(tmp_path.iterdir()) == [], "a quick run writes nothing"
    done = subprocess.run([*command[:-2], "no-such-case"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "growth has no case 'no-such-case'" in done.stderr
