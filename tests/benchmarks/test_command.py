"""benchmarks/run.py from the shell: what is not there is told in one line, and Ctrl-C ends it with one."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import harness
import machine
import pytest
import run
import table
from harness import Contender

SCRIPT = Path(run.__file__)


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dense"], "error: argument section: invalid choice: 'dense' .*densenet.*growth.*all.*"),
        (["densenet", "--only", "bc40"], "error: densenet has no case 'bc40'; .* densenet: bc100, densenet121, 3d"),
        (["--only", "bc40"], "error: all has no case 'bc40'; .* densenet: bc100, .*; growth: depth, batch, length"),
        (["densenet", "--fast"], "error: unrecognized arguments: --fast"),
        (["densenet", "--out", "a file"], "error: --out a file is not a folder to write to: File exists"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "a file").touch()
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(expected + "\n", done.stderr), done.stderr


@pytest.mark.parametrize("words", [["growth"], ["growth", "--only", "batch"], ["--quick"]], ids=" ".join)
def test_ctrl_c_is_one_line_and_writes_nothing(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    for section in ("densenet", "growth"):
        monkeypatch.setattr(importlib.import_module(section), "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--out", str(tmp_path)])
    assert run.main() == 130
    section = "densenet" if words == ["--quick"] else "growth"
    assert capsys.readouterr().err == f"\nstopped in {section}: nothing was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("section", run.CASES)
def test_every_case_is_there(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that run.py knows are those that the sections answer to, each with figures of its own."""
    module = importlib.import_module(section)
    ran: list[str] = []

    def figures(case: object, *_: object, **__: object) -> list[harness.Figure]:
        ran.append(str(case))
        return [harness.Figure(str(case), "ours")]

    for name in ("run_case", "token", "blocks", "apply", "point"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, figures)
    if section in ("stream", "growth"):
        monkeypatch.setattr(module, "show", lambda *_: None)
    found = {case: [f.case for f in module.run(only=case)] for case in run.CASES[section]}
    assert all(found.values())
    everything = [f.case for f in module.run()]
    assert sorted(everything) == sorted(case for cases in found.values() for case in cases)
    assert module.run(only="no such case") == []


def test_the_documents_name_the_cases() -> None:
    text = (SCRIPT.parents[1] / "docs" / "benchmarks.md").read_text()
    for section, cases in run.CASES.items():
        (line,) = re.findall(rf"^\| `{section}` \|.*$", text, re.MULTILINE)
        assert set(re.findall(r"`([^`. ]+)`", line.split("|")[2])) == set(cases), section


def test_no_contender_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A section all of whose cases need a package: it is said, and the file and the table say it too."""
    contenders = [Contender("theirs", "none:none", baseline=True, needs="no_such_package")]
    densenet = importlib.import_module("densenet")
    for name in ("BC100", "D121", "D121_3D"):
        monkeypatch.setattr(densenet, name, contenders)
    args = argparse.Namespace(slow=False, quick=False, only="3d", out=tmp_path)
    done: list[str] = []
    run.run(["densenet"], args, done)
    assert done == ["densenet"]
    assert "theirs: not installed (pip install no-such-package)" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name == machine.file_name("densenet", "3d", machine.machine())
    assert "| theirs | not installed (pip install no-such-package)" in table.section_text("densenet", tmp_path)


def test_a_step_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lowtide.errors import ArgumentError

    def fails(**_: object) -> None:
        raise ArgumentError("expected a, got b")

    monkeypatch.setattr(importlib.import_module("densenet"), "run", fails)
    with pytest.raises(SystemExit, match=r"^error: densenet: expected a, got b$"):
        run.run(["densenet"], argparse.Namespace(slow=False, quick=True, only="", out=tmp_path), [])


def test_no_baseline_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has nothing to be compared with gets a dash, not a number."""
    monkeypatch.setattr(harness, "peaks", lambda *_: {"peak": 8, "first_step": 4, "allocated": 8, "kept": 2})
    contenders = [
        Contender("peer", "bench_steps:squares", baseline=True, needs="no_such_package"),
        Contender("ours", "bench_steps:squares", {"numbers": 100}),
    ]
    found = harness.run_case("squares", contenders, repeats=1)
    printed = capsys.readouterr().out
    assert "nan" not in printed
    (line,) = [line for line in printed.splitlines() if "ours" in line]
    assert line.count("- ") >= 3
    machine.write_csv(tmp_path / "densenet-x.csv", found, machine.machine(), "command")
    made = table.section_text("densenet", tmp_path)
    assert "nan" not in made
    assert "| - | 0 MiB, - | 0 MiB, - | 0 MiB |" in made
