"""`train_densenet`: the recipe, the levels, and everything that it refuses before it touches a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data.written_files import write_fashion_mnist, write_folder
from lowtide.errors import ArgumentError, CheckpointError, DataError, LowtideError
from lowtide.levels import LEVELS
from lowtide.models import densenet_bc
from lowtide.train.densenet import (
    DenseNetOptions,
    build_model,
    build_optimizer,
    load_data,
    load_trained,
    train_densenet,
)
from lowtide.train.report import Reporter
from lowtide.train.run import Run
from train.small_runs import log_rows, same, weights

TINY = DenseNetOptions(
    depth=10, growth_rate=4, epochs=2, limit_train=96, limit_test=50, batch_size=32, log_every=1, tensorboard=False
)


def start(options: DenseNetOptions, folder: Path) -> None:
    train_densenet(options, Run(folder), resume=False, overwrite=False, reporter=Reporter())


def test_the_published_recipe() -> None:
    """Huang et al. 2017, section 4.2: the rate falls to a tenth at 50 % and 75 % of the steps."""
    model = densenet_bc(10, 4)
    optimizer, schedule = build_optimizer(model, DenseNetOptions(), n_steps=40)
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == [0.1] * 20 + [pytest.approx(0.01)] * 10 + [pytest.approx(0.001)] * 10
    group = optimizer.param_groups[0]
    assert len(optimizer.param_groups) == 1
    assert (group["momentum"], group["nesterov"], group["weight_decay"], group["dampening"]) == (0.9, True, 1e-4, 0)
    assert sum(p.numel() for p in group["params"]) == sum(p.numel() for p in model.parameters())
    assert (DenseNetOptions().batch_size, DenseNetOptions().lr) == (64, 0.1)


def test_every_level_trains_the_same_network(tmp_path: Path) -> None:
    """float64, six free steps: the loss curves agree to rounding."""
    curves = {}
    for level in LEVELS:
        start(dataclasses.replace(TINY, precision="float64", recompute=level), tmp_path / level)
        curves[level] = [row["loss"] for row in log_rows(tmp_path / level) if row["event"] == "step"]
    assert len(curves["none"]) == 6
    assert len(set(curves["none"])) == 6
    for level in LEVELS:
        assert max(abs(a - b) for a, b in zip(curves[level], curves["none"], strict=True)) < 1e-10
        for name, value in weights(tmp_path / level).items():
            assert torch.allclose(value, weights(tmp_path / "none")[name], rtol=1e-9, atol=1e-12)


def test_the_level_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    start(dataclasses.replace(TINY, precision="float64", recompute="none"), tmp_path / "run")
    before = weights(tmp_path / "run")
    model = load_trained(tmp_path / "run").model
    model.set_recompute("layer")
    assert same({k: v.detach() for k, v in model.state_dict().items()}, before)


def test_the_seed_fixes_the_weights_whatever_was_drawn_before() -> None:
    data = load_data(TINY)

    def built(seed: int) -> dict[str, torch.Tensor]:
        return build_model(dataclasses.replace(TINY, seed=seed), 10, data.preprocessing).state_dict()

    first = built(0)
    state = torch.get_rng_state()
    torch.rand(3)
    assert same(built(0), first)
    torch.set_rng_state(state)
    built(1)
    assert torch.equal(torch.get_rng_state(), state), "building draws from a stream of its own"
    assert not same(built(1), first)


def test_it_learns(tmp_path: Path) -> None:
    """Enough steps on the digits to be far from chance (90 %)."""
    options = dataclasses.replace(
        TINY, growth_rate=8, limit_train=None, limit_test=None, epochs=4, lr=0.2, augment="none"
    )
    summary = train_densenet(options, Run(tmp_path / "run"), resume=False, overwrite=False, reporter=Reporter())
    assert summary.test_error_percent < 50
    assert summary.n_test == 360


REFUSED: dict[str, tuple[dict[str, object], type[LowtideError], str]] = {
    "level": ({"recompute": "leyer"}, ArgumentError, "--recompute: expected recompute to be one of none, pointwise"),
    "network": ({"arch": "densnet121"}, ArgumentError, "--arch: expected one of bc, densenet121"),
    "depth": ({"depth": 41}, ArgumentError, "expected depth = 6n"),
    "precision": ({"precision": "fp16"}, ArgumentError, "--precision: expected one of float32, bf16, float64"),
    "augment": ({"augment": "mixup"}, ArgumentError, "--augment: expected one of standard, none"),
    "batch size": ({"batch_size": 0}, ArgumentError, "--batch-size: expected at least 1, got 0"),
    "accumulate": ({"accumulate": 17}, DataError, "two samples or more for each of 17 shares"),
    "epochs": ({"epochs": 0}, ArgumentError, "--epochs: expected at least 1, got 0"),
    "lr": ({"lr": 0.0}, ArgumentError, "--lr: expected a positive number"),
    "weight decay": ({"weight_decay": -1.0}, ArgumentError, "--weight-decay: expected 0 or more"),
    "momentum": ({"momentum": 1.0}, ArgumentError, "--momentum: expected a number in"),
    "dropout": ({"drop_rate": 1.0}, ArgumentError, "--drop-rate: expected a number in"),
    "workers": ({"workers": -1}, ArgumentError, "--workers: expected 0 or more"),
    "device": ({"device": "tpu9"}, ArgumentError, "--device: expected a device that is here, got tpu9"),
    "cuda index": ({"device": "cuda:77"}, ArgumentError, "--device: expected a device that is here, got cuda:77"),
    "data": ({"data": "mnits"}, ArgumentError, "--data: expected one of digits"),
    "folder": (
        {"data": "folder:absent"},
        DataError,
        "absent: expected a folder of images by class, got no such folder",
    ),
    "validation": ({"validation": 1.0}, ArgumentError, "--validation: expected a fraction"),
    "limit": ({"limit_test": 0}, ArgumentError, "--limit-test: expected at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_before_a_file_is_touched(tmp_path: Path, case: str) -> None:
    change, kind, said = REFUSED[case]
    with pytest.raises(kind) as caught:
        start(dataclasses.replace(TINY, **change), tmp_path / "run")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arch", ["densenet121", "bc"])
def test_pictures_too_small_for_the_network(tmp_path: Path, arch: str) -> None:
    write_folder(tmp_path / "pictures", ("a", "b"), per_class=10)
    # after the stem and its pooling (a quarter of the size, rounded up) three halvings need 8; two halvings need 4
    size, least = (28, 29) if arch == "densenet121" else (3, 4)
    options = dataclasses.replace(TINY, data=f"folder:{tmp_path / 'pictures'}", arch=arch, image_size=size)
    with pytest.raises(ArgumentError, match=rf"pictures of at least {least} x {least} .*got {size} x {size}"):
        start(options, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    data = load_data(dataclasses.replace(options, image_size=least))
    model = build_model(dataclasses.replace(options, image_size=least), 2, data.preprocessing).eval()
    assert model(torch.zeros(1, 3, least, least)).shape == (1, 2), "the least size that is named does work"


def test_damaged_data_leaves_an_existing_run_alone(tmp_path: Path) -> None:
    """Asked to overwrite, it reads the data first: a damaged file must not cost the old run."""
    start(TINY, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    write_fashion_mnist(tmp_path / "data", compress=False)
    (tmp_path / "data" / "t10k-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03")
    options = dataclasses.replace(TINY, data="fashion-mnist", data_dir=str(tmp_path / "data"), limit_train=None)
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte"):
        train_densenet(options, Run(tmp_path / "run"), resume=False, overwrite=True, reporter=Reporter())
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    start(TINY, tmp_path / "a")
    start(dataclasses.replace(TINY, growth_rate=5), tmp_path / "b")
    (tmp_path / "a" / "last.pt").write_bytes((tmp_path / "b" / "last.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"last\.pt: expected the \d+ tensors of this DenseNet, got .* shape"):
        train_densenet(TINY, Run(tmp_path / "a"), resume=True, overwrite=False, reporter=Reporter())


def test_photographs_in_folders_train_and_come_back(tmp_path: Path) -> None:
    write_folder(tmp_path / "pictures", ("a", "b", "c"), per_class=20)
    options = dataclasses.replace(
        TINY, data=f"folder:{tmp_path / 'pictures'}", image_size=16, limit_train=None, batch_size=16
    )
    start(options, tmp_path / "run")
    trained = load_trained(tmp_path / "run", best=True)
    assert trained.classes == ("a", "b", "c")
    assert trained.preprocessing.photograph
    assert trained.preprocessing.size == (16, 16)
    assert not trained.model.training
