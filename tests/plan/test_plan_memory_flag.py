"""`lowtide train ... --memory`: the level that fits is chosen and said, what cannot fit is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.cli import run
from lowtide.errors import ArgumentError
from lowtide.measure import measure
from lowtide.train import densenet, sgconv
from lowtide.train.densenet import DenseNetOptions
from lowtide.train.sgconv import SGConvOptions
from lowtide.train.within import densenet_within, sgconv_within

IMAGES = ["--limit-train", "60", "--limit-test", "20", "--epochs", "1", "--depth", "10", "--growth-rate", "4"]
ROWS = ["--limit-train", "60", "--limit-test", "20", "--epochs", "1", "--d-model", "8", "--n-layers", "2"]


@pytest.mark.parametrize(("kind", "flags"), [("densenet", IMAGES), ("sgconv", ROWS)])
def test_a_run_within_memory(kind: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(["train", kind, *flags, "--batch-size", "20", "--memory", "200MiB", "--out", str(out)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    options = json.loads((out / "options.json").read_text())["options"]
    assert first.startswith(f"--memory 200MiB: level {options['recompute']}, predicted peak ")
    assert options["eval_batch_size"] == 20


@pytest.mark.parametrize(("kind", "flags"), [("densenet", IMAGES), ("sgconv", ROWS)])
def test_what_cannot_fit_is_refused(
    kind: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for memory, words in (
        ("3MB" if kind == "densenet" else "300KB", "--accumulate"),
        ("lots", "--memory"),
        ("1KB", "parameters"),
    ):
        assert run(["train", kind, *flags, "--memory", memory, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
        assert not out.exists()


OPTIONS = DenseNetOptions(depth=16, growth_rate=8, batch_size=32, limit_train=64, limit_test=10)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_less_memory_means_a_leaner_level_and_it_fits(accumulate: int) -> None:
    options = replace(OPTIONS, accumulate=accumulate)
    chosen = []
    for memory in range(64, 2, -3):
        try:
            found, _ = densenet_within(options, f"{memory}MiB")
        except ArgumentError:
            break
        if not chosen or found.recompute != chosen[-1]:
            chosen.append(found.recompute)
            assert _measured(found) <= memory * 2**20
    assert len(chosen) >= 2


def _measured(options: DenseNetOptions) -> int:
    """Bytes at the highest moment of two steps as the training loop makes them."""
    data = densenet.load_data(options)
    model = densenet.build_model(options, len(data.classes), data.preprocessing)
    optimizer, _ = densenet.build_optimizer(model, options, 1)
    shape = (options.batch_size // options.accumulate, data.preprocessing.channels, *data.preprocessing.size)
    there = [*model.parameters(), *model.buffers()]

    def steps() -> None:
        for _ in range(2):
            batches = [torch.randn(shape) for _ in range(options.accumulate)]
            optimizer.zero_grad()
            for x in batches:
                scores = model(x)
                loss = torch.nn.functional.cross_entropy(
                    scores, torch.zeros(len(x), dtype=torch.int64), reduction="sum"
                )
                loss.backward()
            optimizer.step()

    # the random numbers of a batch are its only bytes that stand for none in the loop
    return sum(t.numel() * t.element_size() for t in there) + measure(steps, repeats=1).peak_bytes


def test_rows_are_planned_at_the_longest_length() -> None:
    options = SGConvOptions(d_model=8, n_layers=2, batch_size=20, limit_train=64, limit_test=10)
    found, line = sgconv_within(options, "100MiB")
    assert found.recompute in ("none", "pointwise")
    assert line.startswith("--memory 100MiB: level ")
    assert replace(found, recompute="pointwise", eval_batch_size=256) == options
    assert sgconv.load_data(options).format.length == 64
