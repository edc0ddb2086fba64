"""kill -9 of a rank: no hang, nothing left running, and the run goes on bit for bit, by hand or by torchrun's restart.

LOWTIDE_LOST_RANKS=10 kills at ten random moments instead of two.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from torchrun import Torchrun

from train.small_runs import assert_same_run, log_rows

KILLS = int(os.environ.get("LOWTIDE_LOST_RANKS", "2"))
TRAIN = [
    "train", "densenet", "--depth", "10", "--growth-rate", "3", "--epochs", "6", "--limit-train", "120",
    "--limit-test", "40", "--batch-size", "16", "--accumulate", "2", "--drop-rate", "0.1", "--log-every", "1",
    "--checkpoint-every", "2", "--check-ranks-every", "1", "--sync-batch-norm", "--device", "cpu", "--json",
    "--rank-timeout", "100", "--no-tensorboard",
]  # fmt: skip
STEPS = 48


def last_step(folder: Path) -> int:
    """The newest step in the log; 0 before the first."""
    try:
        return max((row["step"] for row in log_rows(folder)), default=0)
    except (OSError, ValueError):  # not there yet; a line that is being written
        return 0


def wait_for_step(run: Torchrun, folder: Path, step: int) -> None:
    until = time.monotonic() + 300
    while last_step(folder) < step and run.process.poll() is None:
        assert time.monotonic() < until, run.said()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    with Torchrun([*TRAIN, "--out", str(folder)], folder.with_suffix(".txt")) as run:
        assert run.wait() == 0, run.said()
        assert run.alive() == {}
    assert run.said().count('"test_error_percent"') == 1  # one rank speaks
    assert log_rows(folder)[-1]["step"] == STEPS
    return folder


def test_killed_and_restarted_by_torchrun(whole: Path, tmp_path: Path) -> None:
    """Every kill in one job: torchrun starts all ranks anew, they go on from the last checkpoint."""
    moments = random.Random(KILLS)
    folder = tmp_path / "run"
    arguments = [*TRAIN, "--out", str(folder)]
    with Torchrun(arguments, tmp_path / "said.txt", restarts=KILLS) as run:
        for kill in range(KILLS):
            # a random moment: after so many steps, and a little later
            first, last = (40 * k // KILLS for k in (kill, kill + 1))
            wait_for_step(run, folder, moments.randrange(first + 1, last))
            time.sleep(moments.uniform(0, 0.03))
            assert run.process.poll() is None, run.said()
            assert run.kill_rank(moments.randrange(2)), "no rank runs"
            time.sleep(0.3)
        assert run.wait() == 0, run.said()
        assert run.alive() == {}
    assert_same_run(folder, whole)


def test_killed_and_resumed_by_hand(whole: Path, tmp_path: Path) -> None:
    """Without a restart the job ends, says which rank died, leaves nothing behind, and can be resumed."""
    folder = tmp_path / "run"
    with Torchrun([*TRAIN, "--out", str(folder)], tmp_path / "first.txt") as run:
        wait_for_step(run, folder, 5)
        assert run.kill_rank(1)
        killed = time.monotonic()
        assert run.wait(90) != 0
        assert time.monotonic() - killed < 60
        assert run.alive() == {}
    assert "Signal 9 (SIGKILL) received by PID" in run.said()
    assert "error: rank 0: expected an answer of every rank, got none of at least one" in run.said()
    assert "continue with --resume" in run.said()
    assert "[rank0]: Traceback" not in run.said()
    with Torchrun([*TRAIN, "--out", str(folder), "--resume"], tmp_path / "second.txt") as run:
        assert run.wait() == 0, run.said()
    assert_same_run(folder, whole)
