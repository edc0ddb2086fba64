"""`lowtide train` on ranks: its log, weights and results against one process, and its checkpoints."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from launch import RankFailed, launch

from lowtide.data import batches
from lowtide.distributed.world import World
from lowtide.train import loop
from lowtide.train.checkpoint import load_checkpoint
from lowtide.train.densenet import DenseNetOptions, load_data, load_trained, train_densenet
from lowtide.train.evaluate import evaluate
from lowtide.train.interrupt import Interrupted
from lowtide.train.objective import classification
from lowtide.train.report import Reporter
from lowtide.train.run import Run
from lowtide.train.sgconv import SGConvOptions, train_sgconv
from train.small_runs import StopAfter, assert_same_run, log_rows, same

# 67 samples in steps of 26: shares of 7 and 6, and a tail of 15
DENSE = DenseNetOptions(
    epochs=2, batch_size=26, limit_train=67, limit_test=23, depth=10, growth_rate=3, lr=0.05, precision="float64",
    log_every=1, tensorboard=False, eval_batch_size=7, check_ranks_every=1, checkpoint_every=2, device="cpu",
)  # fmt: skip
SEQUENCE = SGConvOptions(
    epochs=1, batch_size=26, limit_train=67, limit_test=23, d_model=4, n_layers=1, kernel_dim=4, prenorm=False,
    precision="float64", log_every=1, tensorboard=False, eval_batch_size=7, check_ranks_every=1, device="cpu",
)  # fmt: skip


def run(options: DenseNetOptions | SGConvOptions, folder: str | Path, reporter: Reporter | None = None):
    start = train_densenet if isinstance(options, DenseNetOptions) else train_sgconv
    resume = Run(Path(folder)).exists
    return start(options, Run(Path(folder)), resume=resume, overwrite=False, reporter=reporter or Reporter())


def on_rank(rank, world_size, runs):
    return [dataclasses.asdict(run(options, folder)) for options, folder in runs]


def close(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-9 * max(1.0, abs(want))


def differences(got: Path, want: Path, *, buffers: bool) -> list[str]:
    """In every number of the log, and in the weights; what needs running statistics only where those are the same."""
    rows, others = log_rows(got), log_rows(want)
    assert len(rows) == len(others) >= 4
    found, compared = [], 0
    for row, other in zip(rows, others, strict=True):
        for name, value in row.items():
            needs_buffers = row["event"] == "test" or name.startswith(("validation", "best_validation"))
            if buffers or not needs_buffers:
                compared += isinstance(value, float)
                if not (close(value, other[name]) if isinstance(value, float) else value == other[name]):
                    found.append(f"{row['event']} {name}")
    assert compared >= 12
    one, other = load_checkpoint(got / "last.pt")["model"], load_checkpoint(want / "last.pt")["model"]
    assert one.keys() == other.keys()
    for name, value in one.items():
        if buffers or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            error = float((value.double() - other[name].double()).norm())
            if not error <= 1e-9 * max(float(other[name].double().norm()), 1e-3):
                found.append(name)
    return found


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (2, 2), (4, 1)])
def test_a_run_on_ranks_is_that_of_one_process(tmp_path: Path, world_size: int, accumulate: int) -> None:
    """Own statistics: a process that takes each share as a micro-batch. Those of all: the joined micro-batches."""
    runs = {
        "own": dataclasses.replace(DENSE, accumulate=accumulate),
        "all": dataclasses.replace(DENSE, accumulate=accumulate, sync_batch_norm=True),
        "sequence": dataclasses.replace(SEQUENCE, accumulate=accumulate, sync_batch_norm=True),
    }
    found = launch(on_rank, world_size, [(options, str(tmp_path / name)) for name, options in runs.items()])
    one = {"own": dataclasses.replace(DENSE, accumulate=accumulate * world_size)}
    if accumulate == 1:  # else no process has micro-batches made of these shares
        one |= {"all": DENSE, "sequence": SEQUENCE}
    for name, options in one.items():
        run(options, tmp_path / f"{name} alone")
        assert differences(tmp_path / name, tmp_path / f"{name} alone", buffers=name != "own") == []
    for results in zip(*found, strict=True):  # every rank has the same result
        kept = [{k: v for k, v in result.items() if k not in ("seconds", "peak_memory_bytes")} for result in results]
        assert all(result == kept[0] for result in kept)
        assert kept[0]["n_test"] == 23
    # own statistics differ from rank to rank: the test takes those that the checkpoint has, and sums as one process
    for name, result in zip(("own", "all"), found[0], strict=False):
        trained = load_trained(tmp_path / name, device="cpu")
        data = load_data(trained.options, trained.preprocessing)
        tested = evaluate(trained.model, data.test, classification, 7, "float64")
        assert (tested.loss, tested.error_percent) == (result["test_loss"], result["test_error_percent"])


SMALL = dataclasses.replace(
    DENSE, precision="float32", drop_rate=0.2, accumulate=2, limit_train=60, validation=0.2, sync_batch_norm=True
)


def stopped_and_resumed(rank, world_size, folder):
    run(SMALL, f"{folder}/whole")
    stopped = 0
    while True:
        try:
            run(SMALL, f"{folder}/stopped", StopAfter(1 + stopped % 2, signal.SIGTERM) if rank == 0 else None)
            return stopped
        except Interrupted:
            stopped += 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stop_is_agreed_on_and_the_run_goes_on_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    """One rank alone is asked to stop. Dropout draws from each rank's own generator. With three ranks the order of a
    sum shows, and so would buckets that a resumed run lays out in another way."""
    found = launch(stopped_and_resumed, world_size, str(tmp_path))
    assert len(set(found)) == 1
    assert found[0] >= 2
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    one, other = (load_checkpoint(tmp_path / name / "last.pt")["rng_of_other_ranks"] for name in ("stopped", "whole"))
    assert len(one) == world_size - 1
    assert same(one, other)
    assert not same(one[0], load_checkpoint(tmp_path / "whole" / "last.pt")["rng"])


def resumed_by_others(rank, world_size, folder):
    notes: list[str] = []

    class Listener(Reporter):
        def note(self, text: str) -> None:
            notes.append(text)

    run(SMALL, folder, Listener())
    return notes


def test_another_number_of_ranks_goes_on_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(SMALL, tmp_path / "run", StopAfter(3))
    notes, _ = launch(resumed_by_others, 2, str(tmp_path / "run"))
    assert any("the run used 1 process(es), now 2;" in note for note in notes)
    assert [row["event"] for row in log_rows(tmp_path / "run")].count("epoch") == 2


def with_other_options(rank, world_size, folder):
    run(dataclasses.replace(DENSE, seed=rank), folder)


def with_other_weights(rank, world_size, folder):
    step = loop.nn.utils.get_total_norm

    def disturb(gradients):
        if rank == 1:
            gradients[0].mul_(1 + 1e-12)
        return step(gradients)

    loop.nn.utils.get_total_norm = disturb
    run(DENSE, folder)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (with_other_options, "RankError: lowtide train: expected the same --seed on every rank, got 0 on rank 0, 1 on"),
        (with_other_weights, "RankError: step 1, epoch 1: expected the same values on every rank, got 1 of"),
    ],
)
def test_ranks_do_not_diverge_silently(tmp_path: Path, function, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        launch(function, 2, str(tmp_path / "run"))


def every_rank_takes_the_samples_of_rank_0(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    keys = batches.EpochPlan.keys
    monkeypatch.setattr(batches.EpochPlan, "keys", lambda self, epoch, rank=0, start=0: keys(self, epoch, 0, start))


def the_order_has_no_seed(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(batches, "generator", lambda seed, *stream: torch.Generator().manual_seed(rank))


def gradients_are_not_averaged(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(loop, "share_gradients", lambda model, world: model)


def a_mean_of_means(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank divides by its own number of targets, as a loop does that knows nothing of the others'."""
    total = World.sum

    def own(self: World, values: list[float]) -> list[float]:
        return [values[0] * self.size] if len(values) == 1 else total(self, values)

    monkeypatch.setattr(World, "sum", own)


FAULTS = [every_rank_takes_the_samples_of_rank_0, the_order_has_no_seed, gradients_are_not_averaged, a_mean_of_means]
ONE_EPOCH = dataclasses.replace(DENSE, check_ranks_every=0, epochs=1, batch_size=27)  # shares of 14 and 13


def with_faults(rank, world_size, folder):
    run(ONE_EPOCH, f"{folder}/no fault")
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault(monkeypatch, rank)
            run(ONE_EPOCH, f"{folder}/{fault.__name__}")


def test_the_comparison_sees_faults_of_the_loop(tmp_path: Path) -> None:
    launch(with_faults, 2, str(tmp_path))
    run(dataclasses.replace(ONE_EPOCH, accumulate=2), tmp_path / "alone")
    assert differences(tmp_path / "no fault", tmp_path / "alone", buffers=False) == []
    for fault in FAULTS:
        found = differences(tmp_path / fault.__name__, tmp_path / "alone", buffers=False)
        assert len(found) > 5, fault.__name__
