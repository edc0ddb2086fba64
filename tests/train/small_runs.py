"""A small network that shows everything a resumed run must get right, and runs of it in processes that can be killed.

Dropout draws random numbers, batch norm has buffers, momentum and the schedule have state, augmentation and order
change from epoch to epoch.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

from lowtide.data.images import ImageData
from lowtide.data.load import load_images
from lowtide.train.checkpoint import load_checkpoint
from lowtide.train.loop import Summary, train
from lowtide.train.objective import Objective, classification
from lowtide.train.options import TrainOptions
from lowtide.train.report import Reporter, StepView
from lowtide.train.run import Run

# columns that say how long and how much, not what was learnt
NOT_COMPARED = {"seconds", "samples_per_second", "memory_bytes", "peak_memory_bytes"}


@dataclass(frozen=True)
class SmallOptions(TrainOptions):
    """The options of a run that takes about a second."""

    epochs: int | None = 3
    batch_size: int = 24
    accumulate: int = 2
    lr: float = 0.05
    checkpoint_every: int = 3
    log_every: int = 1
    tensorboard: bool = False


def small_data(seed: int = 0) -> ImageData:
    return load_images("digits", limit_train=200, limit_test=50, seed=seed)


def small_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
            nn.Linear(384, 10),
        )  # fmt: skip


def small_run(
    folder: Path,
    options: SmallOptions | None = None,
    reporter: Reporter | None = None,
    objective: Objective = classification,
    model: nn.Module | None = None,
) -> Summary:
    """Start the run in `folder`, or continue it if it is there."""
    options = options or SmallOptions()
    run = Run(folder)
    if not run.exists:
        run.create("small", options.to_json(), overwrite=False)
    data, model = small_data(options.seed), model or small_model(options.seed)
    optimizer = SGD(model.parameters(), options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = MultiStepLR(optimizer, [12, 20])
    return train(options, model, data, objective, optimizer, schedule, run, reporter)


def weights(folder: Path, name: str = "last.pt") -> dict[str, Tensor]:
    return load_checkpoint(folder / name)["model"]


def log_rows(folder: Path) -> list[dict[str, Any]]:
    """Every line of log.jsonl without the columns that are not compared."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in NOT_COMPARED} for row in rows]


def csv_rows(folder: Path) -> list[list[str]]:
    lines = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    kept = [i for i, column in enumerate(lines[0]) if column not in NOT_COMPARED]
    return [[line[i] for i in kept] for line in lines]


class StopAfter(Reporter):
    """Sends this process a signal after a step: Ctrl-C, unless another one is named."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self._left, self._number = step, number

    def step(self, view: StepView) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(self._number)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, through containers of tensors."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def assert_same_run(got: Path, expected: Path) -> None:
    """Weights, buffers, optimiser, schedule, generators and logs of two finished runs are equal, bit for bit."""
    one, other = load_checkpoint(got / "last.pt"), load_checkpoint(expected / "last.pt")
    for part in ("model", "optimizer", "schedule", "rng"):
        assert same(one[part], other[part]), f"{part} differs"
    assert same(load_checkpoint(got / "best.pt")["model"], load_checkpoint(expected / "best.pt")["model"])
    assert log_rows(got) == log_rows(expected)
    assert csv_rows(got) == csv_rows(expected)
    results = []
    for folder in (got, expected):
        summary = json.loads((folder / "summary.json").read_text())
        results.append({k: v for k, v in summary.items() if k not in NOT_COMPARED | {"checkpoint"}})
    assert results[0] == results[1]
    positions = [{k: v for k, v in c["position"].items() if k != "seconds"} for c in (one, other)]
    assert positions[0] == positions[1]
