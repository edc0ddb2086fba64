"""Sequence runs through the loop: presets, schedule, groups, learning, resume bit for bit, plain against lean, eval."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide import cli
from lowtide.data.load_sequences import load_sequences
from lowtide.data.sequences import SequenceFormat
from lowtide.errors import ArgumentError, CheckpointError
from lowtide.train import densenet, sgconv
from lowtide.train.interrupt import Interrupted
from lowtide.train.presets import PRESETS
from lowtide.train.report import Reporter
from lowtide.train.run import Run
from lowtide.train.sgconv import SGConvOptions, build_model, build_optimizer, train_sgconv
from train.small_runs import assert_same_run, log_rows
from train.test_resume import StopAfter

# layers, d_model, prenorm, norm, kernel_dim, scales, init_scale, init, decay, dropout, tied, lr, wd, batch, epochs, L
TWO, ONE = ("scale", 2, 2), ("power_fixed", 1, 1)
TABLE = {
    "lra-listops": (8, 128, False, "batch", 1, 12, 0, "randn", TWO, 0, False, 0.01, 0.05, 50, 40, 2048),
    "lra-text": (6, 256, True, "batch", 2, 12, 0, "randn", TWO, 0, False, 0.01, 0.05, 16, 32, 4096),
    "lra-retrieval": (6, 256, True, "batch", 1, 13, 0, "randn", TWO, 0, False, 0.01, 0.05, 32, 20, 4000),
    "lra-image": (6, 512, False, "layer", 32, 6, 0, "randn", ONE, 0.2, True, 0.01, 0.05, 50, 200, 1024),
    "lra-pathfinder": (6, 256, True, "batch", 32, 6, 0, "randn", TWO, 0.2, False, 0.004, 0.03, 64, 200, 1024),
    "lra-path-x": (6, 256, True, "batch", 64, 8, 1, "cos", ("scale", 1, 3), 0, False, 0.004, 0.03, 16, 50, 16384),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_presets_match_the_table_and_build(name: str) -> None:
    o = PRESETS[name]
    got = (
        o.n_layers, o.d_model, o.prenorm, o.norm, o.kernel_dim, o.n_scales, o.init_scale, o.init,
        (o.decay, o.decay_min, o.decay_max), o.dropout, o.tie_dropout, o.lr, o.weight_decay, o.batch_size, o.epochs,
        o.l_max,
    )  # fmt: skip
    assert got == TABLE[name]
    assert (o.kernel_lr, o.bidirectional, o.glu, o.combine) == (0.001, True, True, "cat")
    assert set(TABLE) == {name for name in PRESETS if name.startswith("lra-")}
    small = dataclasses.replace(o, d_model=8)
    model = build_model(small, 10, SequenceFormat(1, None, 100))
    layer = model.blocks[0].layer
    assert layer.form.kernel.taps >= o.l_max
    assert (layer.form.bidirectional, layer.form.postact, layer.form.drop_rate) == (True, "glu", o.dropout)
    assert len(model.blocks) == o.n_layers
    assert model(torch.randn(2, 100, 1)).shape == (2, 10)


def test_optimiser_groups_and_schedule() -> None:
    options = SGConvOptions(d_model=4, n_layers=1, kernel_dim=4)
    model = build_model(options, 10, SequenceFormat(1, None, 16))
    optimizer, schedule = build_optimizer(model, options, 100)
    kernels = {id(p) for p in model.blocks[0].layer.kernel_list}
    others, of_kernels = optimizer.param_groups
    assert {id(p) for p in of_kernels["params"]} == kernels
    assert (others["weight_decay"], of_kernels["weight_decay"]) == (0.05, 0.0)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    assert [rate[0] for rate in rates[:10]] == pytest.approx([0.001 * (i + 1) for i in range(10)])
    assert [rate[0] for rate in rates[10:]] == pytest.approx(
        [0.01 * math.cos(math.pi * i / 180) ** 2 for i in range(90)]
    )
    assert all(kernel == pytest.approx(other / 10) for other, kernel in rates)


# trees short enough that rows of many lengths share a batch; dropout draws random numbers, batch norm has buffers
SMALL = SGConvOptions(
    data="listops", listops_length=(6, 30), listops_trees=(120, 20, 20), epochs=2, batch_size=24, accumulate=2,
    d_model=8, n_layers=2, kernel_dim=4, dropout=0.1, checkpoint_every=3, log_every=1, tensorboard=False, device="cpu",
)  # fmt: skip


def run_in(folder: Path, options: SGConvOptions, root: Path, reporter: Reporter | None = None) -> None:
    run = Run(folder)
    options = dataclasses.replace(options, data_dir=str(root))
    train_sgconv(options, run, resume=run.exists, overwrite=False, reporter=reporter or Reporter())


@pytest.mark.parametrize("after", [1, 4, 5, 8])
def test_resumed_bit_for_bit(tmp_path: Path, after: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_in(tmp_path / "whole", SMALL, tmp_path)
        with pytest.raises(Interrupted):
            run_in(tmp_path / "stopped", SMALL, tmp_path, StopAfter(after))
        run_in(tmp_path / "stopped", SMALL, tmp_path)
        assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    finally:
        torch.set_num_threads(threads)


def test_the_loss_falls(tmp_path: Path) -> None:
    options = SGConvOptions(
        data="digits", limit_train=400, limit_test=100, epochs=5, lr=0.01, d_model=16, n_layers=2, kernel_dim=8,
        log_every=1, tensorboard=False, device="cpu",
    )  # fmt: skip
    run_in(tmp_path / "run", options, tmp_path)
    epochs = [row for row in log_rows(tmp_path / "run") if row["event"] == "epoch"]
    losses = [row["train_loss"] for row in epochs]
    assert losses[-1] < 0.75 * losses[0]
    # a guess is wrong nine times in ten
    assert epochs[-1]["validation_error_percent"] < 75


def test_plain_and_lean_curves_agree(tmp_path: Path) -> None:
    """In float64 two runs of twelve steps part by rounding alone; another seed does not."""
    curves = {}
    for name, changes in {
        "none": {"recompute": "none"}, "pointwise": {}, "layer": {"recompute": "layer"},
        "block": {"recompute": "block"}, "other": {"seed": 1},
    }.items():  # fmt: skip
        options = dataclasses.replace(SMALL, precision="float64", **changes)
        run_in(tmp_path / name, options, tmp_path)
        rows = [row for row in log_rows(tmp_path / name) if row["event"] == "step"]
        curves[name] = np.array([[row["loss"], row["gradient_norm"]] for row in rows])
    assert len(curves["none"]) == 10
    for name in ("pointwise", "layer", "block"):
        assert np.allclose(curves[name], curves["none"], rtol=1e-8, atol=0), name
    assert not np.allclose(curves["other"], curves["none"], rtol=1e-2, atol=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(root):
        flags = "--listops-length 6 30 --listops-trees 60 20 20 --d-model 8 --n-layers 2 --epochs 1 --no-tensorboard"
        assert cli.run(["train", "sgconv", "--preset", "lra-listops", *flags.split(), "--out", "run", "--json"]) == 0
    return root


def test_flags_override_a_preset(trained: Path) -> None:
    stored = json.loads((trained / "run" / "options.json").read_text())["options"]
    options = SGConvOptions.from_json(json.dumps(stored), "")
    expected = dataclasses.replace(
        PRESETS["lra-listops"], listops_length=(6, 30), listops_trees=(60, 20, 20), d_model=8, n_layers=2, epochs=1,
        tensorboard=False,
    )  # fmt: skip
    assert options == expected


def test_eval_gives_the_runs_own_figures(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "run" / "summary.json").read_text())
    with contextlib.chdir(trained):
        assert cli.run(["eval", "run", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-5)
        assert (found["error_percent"], found["n_targets"]) == (summary["test_error_percent"], 20)
        # one row at a time: padding changes nothing
        assert cli.run(["eval", "run", "--json", "--batch-size", "1"]) == 0
        assert json.loads(capfd.readouterr().out)["loss"] == pytest.approx(found["loss"], rel=1e-4)
        assert cli.run(["eval", "run", "--part", "validation"]) == 0
        assert "on 20 rows" in capfd.readouterr().out
        assert cli.run(["eval", "run", "--data", "digits"]) == 2
        error = capfd.readouterr().err
        assert "expected 16 tokens and 10 classes, got 1 numbers per position and 10 classes" in error


def test_a_checkpoint_of_the_other_kind_is_refused(trained: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint of lowtide train densenet, got one of lowtide"):
        densenet.load_trained(trained / "run")


def test_resume_on_the_command_line(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(trained):
        assert cli.run(["train", "sgconv", "--out", "run", "--resume"]) == 0
        assert "on 20 rows" in capfd.readouterr().out
        assert cli.run(["train", "sgconv", "--out", "run", "--resume", "--d-model", "9"]) == 2
        assert "expected --d-model 8, as the run was started, got 9" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset lra-text", "--preset lra-text: expected --data npz:PATH, got none"),
        ("--preset lra-speech", "lra-pathfinder"),
        ("--data mnist", "--data: expected one of digits, fashion-mnist, cifar10, listops, npz:PATH"),
        ("--warmup 1", "--warmup: expected a fraction in [0, 1)"),
        ("--kernel-dim 0", "kernel_dim"),
        ("--recompute leyer", "leyer"),
        ("--listops-length 50 20 --data listops", "--listops-length"),
        ("--data npz:none.npz", "none.npz: expected an .npz file, got no such file"),
    ],
)
def test_bad_flags(tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with contextlib.chdir(tmp_path):
        assert cli.run(["train", "sgconv", *flags.split(), "--out", "run"]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_rows_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which half is louder: learnt from a file with padded rows, whose padding holds NaN."""
    draws = np.random.default_rng(0)
    y, lengths = draws.integers(0, 2, 400), draws.integers(8, 17, 400)
    x = draws.normal(size=(400, 16)) * 0.1 + np.where(y, 1, -1)[:, None]
    x[np.arange(16) >= lengths[:, None]] = np.nan
    np.savez(tmp_path / "own.npz", x=x, y=y, lengths=lengths)
    flags = "--d-model 8 --n-layers 1 --kernel-dim 4 --epochs 3 --no-tensorboard --json"
    with contextlib.chdir(tmp_path):
        assert cli.run(["train", "sgconv", "--data", "npz:own.npz", *flags.split()]) == 0
        assert json.loads(capfd.readouterr().out)["test_error_percent"] == 0
        assert cli.run(["eval", "runs/sgconv-own-1x8-seed0", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["n_targets"] == 40


def test_options_out_of_range() -> None:
    for changes in ({"dropout": 1.0}, {"kernel_lr": 0.0}, {"l_max": 0}, {"pool": "max"}, {"norm": "group"}):
        with pytest.raises(ArgumentError):
            dataclasses.replace(SGConvOptions(), **changes).check()


def test_the_default_length_is_the_data_sets() -> None:
    data = load_sequences("digits", side=16)
    assert build_model(SGConvOptions(), 10, data.format).blocks[0].layer.l_max == 256
    assert sgconv.default_epochs("npz:x") == 20
