"""The same network trained plain and lean from one seed, and what a step of each costs: figures of `lowtide demo`."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from lowtide.levels import Level
from lowtide.measure.child import Part, run_in_child
from lowtide.models import densenet_bc
from lowtide.train.densenet import DenseNetOptions, train_densenet
from lowtide.train.report import Reporter
from lowtide.train.run import Run

STEP_BATCH, STEP_SIZE = 64, 32
FIRST_STEPS = 5
# "block" lowers what is kept between forward and backward, not the peak of a step, which is what is shown here
COST_LEVELS: tuple[Level, ...] = ("none", "pointwise", "layer")


@dataclass(frozen=True)
class Curve:
    """One training run: its loss at every step, and what came of it."""

    losses: list[float]
    test_error_percent: float
    seconds_per_step: float


@dataclass(frozen=True)
class StepCost:
    """One training step (forward, backward, SGD with momentum) of a BC network, batch 64 at 32x32, in its own process.

    peak_bytes: largest sum of allocated bytes over what was there before the step. seconds: median, where it was taken.
    """

    depth: int
    level: Level
    peak_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Comparison:
    """All figures of the demo. `other_layout` is the plain network with its maps stored channels-last: the same numbers
    in another order of summation, so its distance from plain is what rounding alone does."""

    options: DenseNetOptions
    plain: Curve
    lean: Curve
    other_layout: Curve
    plain_float64: Curve
    lean_float64: Curve
    plain_cost: StepCost
    lean_cost: StepCost
    published_costs: list[StepCost]
    threads: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"differences": self.differences()})

    def differences(self) -> dict[str, float]:
        """Largest absolute difference of two loss curves."""
        plain, lean, other = self.plain.losses, self.lean.losses, self.other_layout.losses
        first = slice(FIRST_STEPS)
        return {
            "float64": largest_difference(self.plain_float64.losses, self.lean_float64.losses),
            "float32_first_steps": largest_difference(plain[first], lean[first]),
            "float32_first_steps_plain_in_another_layout": largest_difference(plain[first], other[first]),
            "float32": largest_difference(plain, lean),
            "float32_plain_in_another_layout": largest_difference(plain, other),
        }


def largest_difference(a: list[float], b: list[float]) -> float:
    """Of two equally long curves."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def compare(options: DenseNetOptions, published_depth: int, reporter: Reporter) -> Comparison:
    """Train plain, lean (`options.recompute`) and plain in another layout, and measure the steps.

    published_depth: of a deeper network, one step of which is measured at several levels.

    Raises:
        LowtideError: of the kinds that `train_densenet` and `run_in_child` raise.
    """
    plain = dataclasses.replace(options, recompute="none", log_every=1, tensorboard=False)
    lean = dataclasses.replace(plain, recompute=options.recompute)
    other_layout = dataclasses.replace(plain, channels_last=True)
    # a few free steps in float64, where rounding is too small to hide a fault
    short = {"precision": "float64", "epochs": 1, "limit_train": FIRST_STEPS * options.batch_size, "limit_test": 64}
    with tempfile.TemporaryDirectory(prefix="lowtide-demo-") as folder:

        def curve(name: str, chosen: DenseNetOptions) -> Curve:
            reporter.note(f"training {name.replace('-', ' ')}")
            return _train(chosen, Path(folder) / name, reporter)

        curves = {
            "plain": curve("plain", plain),
            "lean": curve("lean", lean),
            "other_layout": curve("plain-channels-last", other_layout),
            "plain_float64": curve("plain-float64", dataclasses.replace(plain, **short)),
            "lean_float64": curve("lean-float64", dataclasses.replace(lean, **short)),
        }

    def cost(depth: int, level: Level, with_time: bool) -> StepCost:
        reporter.note(f"measuring one step of BC-{depth} at level {level}")
        return measure_step(depth, options.growth_rate, level, with_time)

    return Comparison(
        options=lean,
        **curves,
        plain_cost=cost(options.depth, "none", False),
        lean_cost=cost(options.depth, options.recompute, False),
        published_costs=[cost(published_depth, level, True) for level in COST_LEVELS],
        threads=torch.get_num_threads(),
    )


def _train(options: DenseNetOptions, folder: Path, reporter: Reporter) -> Curve:
    summary = train_densenet(options, Run(folder), resume=False, overwrite=False, reporter=reporter)
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    seconds = statistics.median(options.batch_size / event["samples_per_second"] for event in steps)
    return Curve([event["loss"] for event in steps], summary.test_error_percent, seconds)


def measure_step(depth: int, growth_rate: int, level: Level, with_time: bool) -> StepCost:
    """Peak (and time) of one step, each in a process of its own."""
    kwargs = {"depth": depth, "growth_rate": growth_rate, "level": level}
    parts: tuple[Part, ...] = ("allocations", "process") if with_time else ("allocations",)
    found = run_in_child("lowtide.train.demo:build_step", kwargs, steps=4, parts=parts)
    assert "peak_bytes" in found
    return StepCost(depth, level, found["peak_bytes"], found.get("seconds"))


def build_step(depth: int, growth_rate: int, level: Level) -> Callable[[], None]:
    """One training step on random pictures; its first call makes the momentum buffers, as training does."""
    torch.manual_seed(0)
    model = densenet_bc(depth, growth_rate, recompute=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    images = torch.randn(STEP_BATCH, 3, STEP_SIZE, STEP_SIZE)
    target = torch.randint(10, (STEP_BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), target).backward()
        optimizer.step()

    return step
