"""Who a process is, and what happens when another one does not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launch import launch

from lowtide.distributed.world import World, is_main_process, own_device, was_restarted, world_of_ranks
from lowtide.errors import ArgumentError, RankError
from lowtide.nn import SyncBatchNorm

TOLD = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
CPU = torch.device("cpu")


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def tell(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")


def hangs(rank, world_size):
    tell(rank)
    with pytest.raises(RankError) as caught, world_of_ranks(CPU, timeout_s=4.0) as world:
        assert world.sum([1.0, rank]) == [2.0, 1.0]
        started = time.monotonic()
        if rank == 1:
            time.sleep(7.0)  # alive, but with something else
        world.sum([1.0])
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_hangs_is_given_up_in_time() -> None:
    (said, seconds), _ = launch(hangs, 2, set_up=False, environment=TOLD | {"MASTER_PORT": free_port()})
    assert said.startswith("rank 0: expected an answer of every rank, got none of at least one (")
    assert said.endswith("continue with --resume")
    assert 3.5 < seconds < 6.5


# a process of its own: what is imported before the group is made decides what keeps it
LEAVES_NO_THREAD = r"""
import glob
import torch
from torch import nn
from lowtide.distributed.world import world_of_ranks

def threads():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    return [name for name in names if "gloo" in name]

with world_of_ranks(torch.device("cpu"), 60.0) as world:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model.itself = [model]
    model(torch.ones(2, 3)).sum().backward()
    world.gather({"rank": 0})
    during = threads()
    del model
print(f"{len(during) > 0} {threads()}\n", end="", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="not run: threads are counted in /proc")
def test_no_thread_of_the_group_is_left_to_see_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """One that drops the last message's tensors then would abort a process that had finished its run."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES_NO_THREAD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["True []", "True []", ""]), done.stderr


def agrees(rank, world_size, folder):
    tell(rank)
    with world_of_ranks(CPU, 60.0) as world:
        assert world == World(rank, 2, rank)
        found = {"gathered": world.gather({"rank": rank}), "from main": world.from_main(f"of {rank}")}
        tensors = [torch.full((2, 3), float(rank)), torch.tensor(rank), torch.full((4,), float(rank))]
        world.copy_from_main(tensors)
        found["copied"] = [tensor.tolist() for tensor in tensors]
        with world.first_of_machine_first():
            found["was there"] = os.path.exists(f"{folder}/made")
            time.sleep(0.2 if rank == 0 else 0.0)
            open(f"{folder}/made", "w").close()
    assert not torch.distributed.is_initialized()
    return found


def test_ranks_agree(tmp_path) -> None:
    environment = TOLD | {"MASTER_PORT": free_port()}
    main, other = launch(agrees, 2, str(tmp_path), set_up=False, environment=environment)
    assert (main.pop("was there"), other.pop("was there")) == (False, True)
    assert main == other == {
        "gathered": [{"rank": 0}, {"rank": 1}],
        "from main": "of 0",
        "copied": [[[0.0] * 3] * 2, 0, [0.0] * 4],
    }  # fmt: skip


def test_alone_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with world_of_ranks(CPU, 1.0) as world:
        assert not torch.distributed.is_initialized()
        assert world == World()
        assert world.is_main
        assert world.sum([1, 2.5]) == [1, 2.5]
        assert world.gather("x") == ["x"]
        world.check_same({"anything": 1}, "here")
    assert is_main_process()
    assert not was_restarted()


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert own_device(gpu) == gpu  # not started by torchrun
    for name, value in {**TOLD, "MASTER_PORT": "1", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert not is_main_process()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(CPU) == CPU
    assert own_device(gpu) == torch.device("cuda", 1)
    with pytest.raises(
        ArgumentError, match=r"--device: expected a GPU per process, got cuda:0 for all; use --device cu"
    ):
        own_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match=r"expected a GPU per process, got 1 for process 2 of this machine; lower"):
        own_device(gpu)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert was_restarted()


def test_sync_batch_norm_alone_is_batch_norm() -> None:
    torch.manual_seed(0)
    plain = torch.nn.BatchNorm2d(3, momentum=None).double()
    ours = SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(plain))[0]
    assert type(ours) is SyncBatchNorm
    assert ours.weight is plain.weight
    assert ours.running_var is plain.running_var
    other = torch.nn.BatchNorm2d(3, momentum=None).double()
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
        assert torch.equal(ours(x), other(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), other.buffers(), strict=True))
    assert ours.state_dict().keys() == other.state_dict().keys()
    with pytest.raises(ArgumentError, match=r"SyncBatchNorm: expected a map \(N, c, \*S\), got \(3,\)"):
        ours(torch.zeros(3, dtype=torch.float64))
