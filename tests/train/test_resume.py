"""A run that is killed and resumed equals one that was not, bit for bit: weights, state and every column of the log."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from lowtide.errors import CheckpointError
from lowtide.train.interrupt import Interrupted
from lowtide.train.report import Reporter, StepView
from train.small_runs import SmallOptions, StopAfter, assert_same_run, log_rows, same, small_run, weights

# processes forked from one that has imported everything: a start takes milliseconds, so that moments fall into the run
_STARTER = multiprocessing.get_context("forkserver")
_STARTER.set_forkserver_preload(["train.small_runs", "sklearn.datasets", "lowtide.data.augment"])


def _in_process(folder: str) -> None:
    torch.set_num_threads(1)
    small_run(Path(folder))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run without interruption, in a process of its own as the others are, and how long it took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    _finish(folder)
    started = time.perf_counter()
    again = folder.with_name("again")
    _finish(again)
    assert_same_run(again, folder)
    return folder, time.perf_counter() - started


def _finish(folder: Path) -> None:
    process = _STARTER.Process(target=_in_process, args=(str(folder),))
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize("part", range(5))
def test_killed_at_random_moments_and_resumed(uninterrupted: tuple[Path, float], tmp_path: Path, part: int) -> None:
    """Four kills in each of five runs: twenty moments."""
    whole, seconds = uninterrupted
    moments = random.Random(part)
    folders = [tmp_path / "run 0"]
    killed = 0
    while killed < 4:
        folder = folders[-1]
        process = _STARTER.Process(target=_in_process, args=(str(folder),))
        process.start()
        time.sleep(moments.uniform(0, 0.6 * seconds))
        process.kill()  # SIGKILL; nothing if it is done
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, 0)
        if process.exitcode == 0:  # it was done before the kill: another run takes the kills that are left
            folders.append(tmp_path / f"run {len(folders)}")
        else:
            killed += 1
    for folder in folders:
        _finish(folder)
        assert_same_run(folder, whole)


def _kill_at(function: str, call: int, after: bool) -> None:
    """End this process as kill -9 does, just before or just after the n-th call of a function that writes."""
    module, name = {"replace": (Path, "replace"), "fsync": (os, "fsync")}[function]
    original = getattr(module, name)
    seen = 0

    def counting(*args: object) -> object:
        nonlocal seen
        seen += 1
        if seen == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args)
        if seen == call and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, counting)


def _killed_while_writing(folder: str, function: str, call: int, after: bool) -> None:
    _kill_at(function, call, after)
    _in_process(folder)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("function", "call"), [("replace", 1), ("replace", 2), ("replace", 4), ("fsync", 9), ("fsync", 24)]
)
def test_killed_while_a_file_is_written(
    uninterrupted: tuple[Path, float], tmp_path: Path, function: str, call: int, after: bool
) -> None:
    """The moments that chance would seldom find: before and after a rename, in the middle of a checkpoint."""
    folder = tmp_path / "run"
    process = _STARTER.Process(target=_killed_while_writing, args=(str(folder), function, call, after))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, "the run made fewer such calls than this"
    _finish(folder)
    assert_same_run(folder, uninterrupted[0])


@pytest.mark.parametrize("step", [1, 4, 9, 18, 27])
def test_ctrl_c_saves_and_the_run_goes_on(uninterrupted: tuple[Path, float], tmp_path: Path, step: int) -> None:
    """In the middle of an epoch (1, 4), at an epoch's last step (9, 18) and at the last of all (27)."""
    folder = tmp_path / "run"
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(1)
    try:
        with pytest.raises(Interrupted, match=rf"stopped after step {step}, epoch \d; the state is in .*last\.pt"):
            small_run(folder, reporter=StopAfter(step))
        assert signal.getsignal(signal.SIGINT) is handler
        small_run(folder)
    finally:
        torch.set_num_threads(threads)
    assert_same_run(folder, uninterrupted[0])


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    class Twice(Reporter):
        def step(self, view: StepView) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        small_run(tmp_path / "run", reporter=Twice())
    assert not isinstance(caught.value, Interrupted)


def test_the_check_sees_a_generator_that_is_not_restored(
    uninterrupted: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the state that a careless resume would forget, forgotten in turn: the comparison must see it."""
    from lowtide.train import rng, run

    def stopped(name: str) -> Path:
        folder = tmp_path / name
        with contextlib.suppress(Interrupted):
            small_run(folder, reporter=StopAfter(4))
        return folder

    def differs(folder: Path) -> bool:
        small_run(folder)
        try:
            assert_same_run(folder, uninterrupted[0])
        except (AssertionError, CheckpointError, ValueError):  # no best.pt; a log line that is no JSON
            return True
        return False

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert not differs(stopped("nothing forgotten"))
        with monkeypatch.context() as patch:
            patch.setattr(rng, "restore", lambda state: None)
            assert differs(stopped("generators"))
        load = run.load_checkpoint
        for forgotten in ("optimizer", "schedule", "step_in_epoch", "loss_sum", "best_error_percent", "log"):

            def forget(path: Path, part: str = forgotten) -> dict:
                content = load(path)
                if part == "optimizer":
                    content["optimizer"]["state"] = {}
                elif part == "schedule":
                    content["schedule"]["last_epoch"] = 0
                elif part == "log":
                    content["log"] = {name: (path.parent / name).stat().st_size - 1 for name in content["log"]}
                else:
                    content["position"][part] = 0
                return content

            folder = stopped(forgotten)
            with monkeypatch.context() as patch:
                patch.setattr(run, "load_checkpoint", forget)
                assert differs(folder), forgotten
    finally:
        torch.set_num_threads(threads)


def test_workers_and_the_loops_settings_change_no_number(tmp_path: Path) -> None:
    small_run(tmp_path / "a")
    changed = dataclasses.replace(SmallOptions(), workers=2, eval_batch_size=7, checkpoint_every=5)
    small_run(tmp_path / "b", changed)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    steps = [[row for row in log_rows(tmp_path / name) if row["event"] == "step"] for name in ("a", "b")]
    assert steps[0] == steps[1]


def test_the_seed_changes_everything(tmp_path: Path) -> None:
    small_run(tmp_path / "a")
    small_run(tmp_path / "b", dataclasses.replace(SmallOptions(), seed=1))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert log_rows(tmp_path / "a")[0]["loss"] != log_rows(tmp_path / "b")[0]["loss"]


def test_a_log_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", reporter=StopAfter(4))
    log = tmp_path / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"log\.jsonl: expected \d+ bytes or more, as when the checkpoint was made"
    ):
        small_run(tmp_path / "run")
