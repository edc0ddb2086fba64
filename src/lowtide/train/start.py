"""From options to a trained network: the order in which things are checked, built and written, for every network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowtide.data.batches import EpochPlan, SplitData
from lowtide.distributed.world import World, world_of_ranks
from lowtide.levels import Level
from lowtide.train.evaluate import model_device
from lowtide.train.loop import Summary, synchronise_batch_norm, train
from lowtide.train.objective import classification
from lowtide.train.options import TrainOptions, choose_device
from lowtide.train.report import Reporter
from lowtide.train.run import Run


class NamedData(SplitData, Protocol):
    @property
    def name(self) -> str: ...


Data = TypeVar("Data", bound=NamedData)


@dataclass(frozen=True)
class Recipe(Generic[Data]):
    """What one kind of network brings to a run."""

    kind: str
    recompute: Level
    load_data: Callable[[], Data]
    build_model: Callable[[Data], nn.Module]
    # of a model, for so many steps
    build_optimizer: Callable[[nn.Module, int], tuple[Optimizer, LRScheduler]]
    # what the parts of the data consist of
    samples: Callable[[Data], str]
    # the strings stored in each checkpoint
    describe: Callable[[Data], dict[str, str]]


def start(
    options: TrainOptions, recipe: Recipe[Data], run: Run, *, resume: bool, overwrite: bool, reporter: Reporter
) -> Summary:
    """Build everything, then train; what can be refused is refused before the run's folder is touched.

    Args:
        options: checked, with `epochs` set.

    Raises:
        LowtideError: of the kinds that the recipe's functions, `Run` and `train` raise.
    """
    with world_of_ranks(choose_device(options.device), options.rank_timeout) as world:
        return _start(options, recipe, run, resume, overwrite, reporter, world)


def _start(
    options: TrainOptions,
    recipe: Recipe[Data],
    run: Run,
    resume: bool,
    overwrite: bool,
    reporter: Reporter,
    world: World,
) -> Summary:
    if not resume and world.is_main:
        run.check_free(overwrite)
    with world.first_of_machine_first():
        data = recipe.load_data()
    model = recipe.build_model(data)
    if options.sync_batch_norm and world.size > 1:
        synchronise_batch_norm(model)
    plan = EpochPlan(len(data.train), options.batch_size, options.seed, options.accumulate, world.size)
    assert options.epochs is not None
    optimizer, schedule = recipe.build_optimizer(model, options.epochs * plan.steps)
    if not resume and world.is_main:
        run.create(recipe.kind, options.to_json(), overwrite)
    parameters = sum(p.numel() for p in model.parameters())
    n_validation = len(data.validation) if data.validation else 0
    reporter.note(
        f"{run.folder}: {parameters:,} parameters, memory level {recipe.recompute}, {model_device(model)}; "
        f"{data.name}: {len(data.train)} training, {n_validation} validation, {len(data.test)} test "
        f"{recipe.samples(data)}; {options.epochs} epochs of {plan.steps} steps"
    )
    description = recipe.describe(data)
    return train(options, model, data, classification, optimizer, schedule, run, reporter, description, world)
