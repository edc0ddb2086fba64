"""The launcher itself: results by rank, failures that are seen, nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from launch import RankFailed, launch
from torch import distributed


def shares(rank, world_size, start):
    total = torch.tensor([start + rank])
    distributed.all_reduce(total)
    return {"rank": rank, "total": int(total), "threads": torch.get_num_threads()}


def fails_alone(rank, world_size, how):
    if rank == 1:
        if how == "raise":
            raise ValueError("rank one gives up")
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()  # never complete: the others would wait for ever


def sleeps(rank, world_size, path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def test_each_rank_answers():
    found = launch(shares, 3, 10)
    assert found == [{"rank": rank, "total": 33, "threads": 1} for rank in range(3)]


@pytest.mark.parametrize(("how", "words"), [("raise", "rank one gives up"), ("kill", "rank 1 ended with exit code -9")])
def test_a_rank_that_fails_ends_the_launch(how, words):
    with pytest.raises(RankFailed, match=words):
        launch(fails_alone, 2, how)


def test_ranks_that_hang_are_killed_in_time(tmp_path):
    with pytest.raises(RankFailed, match="not done in time"):
        launch(sleeps, 2, str(tmp_path / "pids"), timeout_s=3.0)
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
