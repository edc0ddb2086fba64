"""Files are whole or absent; a full disk harms no earlier checkpoint; a damaged or foreign checkpoint is named."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import ArgumentError, CheckpointError
from lowtide.train import files
from lowtide.train.checkpoint import load_checkpoint, load_weights, save_checkpoint
from lowtide.train.files import replacing
from lowtide.train.report import Reporter, StepView
from lowtide.train.run import Run
from train.small_runs import SmallOptions, assert_same_run, same, small_run

CONTENT = {"model": {"w": torch.arange(100_000, dtype=torch.float32)}, "position": {"step": 7}}


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The kernel refuses to make a file longer than this, as a full disk does (with EFBIG instead of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, CONTENT)
    read = load_checkpoint(path)
    assert same(read["model"], CONTENT["model"])
    assert read["position"] == {"step": 7}
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize("limit", [0, 1, 1000, 100_000, 399_000])
def test_a_write_that_the_kernel_refuses_harms_no_earlier_file(tmp_path: Path, limit: int) -> None:
    """A real refusal, at several places: before the first byte, in the header, in the tensors, in the directory."""
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"model": {"w": torch.ones(3)}})
    before = path.read_bytes()
    with largest_file(limit), pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, CONTENT)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected to write the file, got File too large; the earlier file is unharmed")
    assert "\n" not in message
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]
    save_checkpoint(path, CONTENT)


class Full(Reporter):
    """From a step on, every fsync says that the disk is full."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self._left, self._patch = step, patch

    def step(self, view: StepView) -> None:
        self._left -= 1
        if self._left == 0:
            self._patch.setattr(files.os, "fsync", _no_space)


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_in_training_stops_it_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path / "whole")
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left on device"):
        small_run(folder, reporter=Full(5, patch))
    assert load_checkpoint(folder / "last.pt")["position"]["step"] == 3
    small_run(folder)
    assert_same_run(folder, tmp_path / "whole")


def test_a_log_that_cannot_grow_stops_the_run(tmp_path: Path) -> None:
    class Limit(Reporter):
        def begin(self, epochs: int, steps_per_epoch: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with largest_file(2**30), pytest.raises(CheckpointError, match=r"log\.jsonl: expected to write the file, got "):
        small_run(tmp_path / "run", reporter=Limit())


def test_an_error_while_writing_leaves_neither_file_nor_rest(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut at the end": lambda content: content[:-1],
    "not a checkpoint": lambda content: b"hello" * 100,
    "a byte in the tensors": lambda content: content[:200_000] + bytes([content[200_000] ^ 1]) + content[200_001:],
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, case: str) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, CONTENT)
    path.write_bytes(DAMAGE[case](path.read_bytes()))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected a whole checkpoint, got {path.stat().st_size} bytes that do not read")
    assert "\n" not in message


def test_other_files_are_not_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint, got no such file"):
        load_checkpoint(tmp_path / "absent.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="expected a lowtide checkpoint, got another kind of file"):
        load_checkpoint(tmp_path / "other.pt")
    save_checkpoint(tmp_path / "later.pt", {"version": 2, "lowtide": "9.0"})
    with pytest.raises(CheckpointError, match=r"expected version 1 or earlier, got version 2, written by lowtide 9\.0"):
        load_checkpoint(tmp_path / "later.pt")


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"format": "lowtide checkpoint", "version": 1, "model": Trap()}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "c.pt")
    assert not (tmp_path / "sprung").exists()


def test_weights_of_another_network_are_refused_and_the_model_is_unchanged() -> None:
    model = nn.Linear(4, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    good = nn.Linear(4, 3).state_dict()
    wrong = [
        ({"weight": good["weight"]}, r"1 tensors missing, such as bias"),
        (good | {"extra": torch.ones(1)}, r"1 it does not have, such as extra"),
        (nn.Linear(5, 3).state_dict(), r"1 of another shape, such as weight \(3, 5\) instead of \(3, 4\)"),
        ({}, r"2 tensors missing"),
    ]
    for state, said in wrong:
        with pytest.raises(CheckpointError, match=rf"^here: expected the 2 tensors of this Linear, got {said}"):
            load_weights(model, state, "here")
        assert same(model.state_dict(), before)
    load_weights(model, good, "here")
    assert same(model.state_dict(), good)


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small_run(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = Run(folder)
    with pytest.raises(ArgumentError, match=r"a run that is there already; continue it with --resume, replace it with"):
        run.create("small", SmallOptions().to_json(), overwrite=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    run.create("small", SmallOptions().to_json(), overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["options.json"]


def test_what_is_no_run_is_not_overwritten_even_if_asked(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for run in (Run(tmp_path), Run(tmp_path / "thesis.txt")):
        with pytest.raises(ArgumentError, match=r"expected a new folder or a run's folder"):
            run.create("small", SmallOptions().to_json(), overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ArgumentError, match="expected a folder that can be made"):
        Run(tmp_path / "thesis.txt" / "run").create("small", SmallOptions().to_json(), overwrite=False)


def test_runs_of_another_kind_and_absent_runs_are_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a run, got none; leave --resume out to start it"):
        Run(tmp_path / "absent").options("small")
    run = Run(tmp_path / "run")
    run.create("train sgconv", SmallOptions().to_json(), overwrite=False)
    with pytest.raises(
        CheckpointError, match="expected a run of lowtide train densenet, got one of lowtide train sgconv"
    ):
        run.options("train densenet")
    (tmp_path / "run" / "options.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected a JSON file"):
        run.options("train sgconv")
