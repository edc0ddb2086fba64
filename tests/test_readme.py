"""What the documents tell a reader to type is typed here: README.md, marked blocks of docs/, docstring examples.

Every `$ lowtide ...` line of the README is run; those that train for minutes with the same flags and smaller numbers
(SMALLER). A line that is not run stands in NOT_RUN with the reason; an entry that no line needs any more is an error.
In docs/, a block is run if the line above it is `<!-- run -->`.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lowtide
from lowtide import cli
from lowtide.data.image_readers import DEBIAN_FASHION_MNIST

REPOSITORY = Path(__file__).parents[1]
RUN_MARK = "<!-- run -->"

NOT_RUN = {
    "git clone <this repository> lowtide && cd lowtide": "the tests run inside such a clone",
    "make demo": "it is `lowtide demo`, which is run here, after the set-up that the tests had already",
    "make test": "it is what runs this test",
    "make setup": "it has made the environment that runs this test",
}

# by command: flags to set, or to put in place of the ones that the line has
SMALLER: dict[str, dict[str, str]] = {
    "train densenet": {"--epochs": "1", "--limit-train": "64", "--limit-test": "32", "--batch-size": "16"},
    "demo": {"--epochs": "1", "--depth": "10", "--growth-rate": "4", "--published-depth": "10", "--limit-train": "320",
             "--limit-test": "32"},
    "verify": {"--input": "4x3x32x32", "--steps": "1", "--dtype": "float64"},
}  # fmt: skip

# commands that must report a difference, by the exit code that says so
EXIT_CODES = {"lowtide verify torchvision:densenet121 --input 4x3x64x64": 1}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, its lines."""

    path: Path
    line: int
    language: str
    lines: tuple[str, ...]
    marked: bool

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}"


def blocks(path: Path, text: str | None = None) -> list[Block]:
    found, inside, above = [], None, ""
    for number, line in enumerate((path.read_text() if text is None else text).splitlines(), start=1):
        if inside is not None:
            if line.strip() == "```":
                found.append(Block(path, inside[0], inside[1], tuple(inside[2]), inside[3]))
                inside = None
            else:
                inside[2].append(line)
        elif line.startswith("```"):
            inside = (number, line[3:].strip(), [], above == RUN_MARK)
        if line.strip():
            above = line.strip()
    assert inside is None, f"{path}: a block is not closed"
    return found


README = REPOSITORY / "README.md"
RUN = [
    *blocks(README),
    *(block for path in sorted((REPOSITORY / "docs").glob("*.md")) for block in blocks(path) if block.marked),
]
COMMANDS = [
    (f"{block.place} {line[2:]}", line[2:].split("  #")[0].strip())
    for block in RUN
    if block.language == "console"
    for line in block.lines
    if line.startswith("$ ")
]
PYTHON_FILES = sorted({block.path for block in RUN if block.language == "python"})


def smaller(argv: list[str]) -> list[str]:
    """The command with SMALLER's flags in place of its own."""
    for command, flags in SMALLER.items():
        words = command.split()
        if argv[: len(words)] == words:
            rest, kept = argv[len(words) :], []
            while rest:
                word = rest.pop(0)
                name, has_value, _ = word.partition("=")
                if name not in flags:
                    kept.append(word)
                elif not has_value:
                    rest.pop(0)
            return [*words, *kept, *(part for item in flags.items() for part in item)]
    return argv


def test_the_shortened_command_keeps_all_other_flags() -> None:
    argv = shlex.split("train densenet --data digits --epochs 300 --lr=0.1 --limit-train=7 --recompute layer")
    flags = [part for item in SMALLER["train densenet"].items() for part in item]
    assert smaller(argv) == ["train", "densenet", "--data", "digits", "--lr=0.1", "--recompute", "layer", *flags]
    assert smaller(["eval", "x"]) == ["eval", "x"]


@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_commands_of_the_documents(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if line in NOT_RUN:
        return
    assert line.startswith("lowtide "), f"{name}: neither a lowtide command nor in NOT_RUN"
    if "fashion-mnist" in line and not DEBIAN_FASHION_MNIST.is_dir():
        if os.environ.get("LOWTIDE_REQUIRE_DATA"):
            pytest.fail(f"{DEBIAN_FASHION_MNIST} is missing: apt-get install dataset-fashion-mnist")
        pytest.skip(f"not run: {DEBIAN_FASHION_MNIST} is missing (Debian's dataset-fashion-mnist)")
    monkeypatch.chdir(tmp_path)
    code = cli.run(smaller(shlex.split(line.removeprefix("lowtide "))))
    captured = capsys.readouterr()
    assert code == EXIT_CODES.get(line, 0), captured.err
    assert captured.out.strip(), "a command prints its result"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=[path.name for path in PYTHON_FILES])
def test_python_of_the_documents(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one document run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": path.stem}
    for block in RUN:
        if block.path == path and block.language == "python":
            # blank lines in front, so that a traceback names the document's own line
            source = "\n" * block.line + "\n".join(block.lines)
            exec(compile(source, str(path), "exec"), namespace)


def test_no_exception_outlives_its_line() -> None:
    lines = {line for _, line in COMMANDS}
    assert set(EXIT_CODES) <= lines
    stale = {line for line in NOT_RUN if line.startswith("lowtide") and line not in lines}
    assert stale == set()


def test_the_readme_has_both_kinds_of_block() -> None:
    assert any(line.startswith("lowtide train") for _, line in COMMANDS)
    assert README in PYTHON_FILES


def test_blocks_are_found() -> None:
    text = "a\n```console\n$ lowtide env\nout\n```\n\n<!-- run -->\n\n```python\nx = 1\n```\n"
    first, second = blocks(README, text)
    assert (first.line, first.language, first.lines, first.marked) == (2, "console", ("$ lowtide env", "out"), False)
    assert (second.line, second.language, second.lines, second.marked) == (9, "python", ("x = 1",), True)
    with pytest.raises(AssertionError, match="not closed"):
        blocks(README, "```python\nx")


# modules that import an optional package at their top, by the package
OPTIONAL: dict[str, str] = {}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(lowtide.__path__, "lowtide.")
    if not re.search(r"\.__main__$", module.name)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in OPTIONAL and importlib.util.find_spec(OPTIONAL[name]) is None:
        pytest.skip(f"not run: {OPTIONAL[name]} is not installed")
    monkeypatch.chdir(tmp_path)
    # from sys.modules: `lowtide.verify` as an attribute is a function
    importlib.import_module(name)
    results = doctest.testmod(sys.modules[name], verbose=False)
    assert results.failed == 0


def test_there_are_docstring_examples() -> None:
    """Some: a change that hides them all from doctest would otherwise pass unseen."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = [
        name for name in MODULES if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]
    assert "lowtide.errors" in with_examples
    assert "lowtide.measure.units" in with_examples
