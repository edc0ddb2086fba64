"""The training loop, read from top to bottom. It knows no model, no data set and no optimiser by name.

What is promised: a run that is stopped (Ctrl-C, kill -9, a full disk) and resumed gives, bit for bit, the weights and
the log of a run that was not, on a CPU with the same number of threads. So nothing that decides a number lives outside
a checkpoint: weights, optimiser, schedule, random generators, the place in the epoch, the epoch's sums so far, the
length of the log.

Under torchrun every rank runs this loop on its share of each step's samples, and rank 0 writes. What the ranks decide
together (to stop, that a step is not finite) is decided by sums that all of them have.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowtide.data.batches import Batch, BatchDataset, EpochPlan, SplitData, make_loader
from lowtide.data.seeds import derive_seed
from lowtide.distributed.data_parallel import check_equal, sending, share_gradients
from lowtide.distributed.world import World
from lowtide.errors import NonFiniteError, describe
from lowtide.nn import SyncBatchNorm
from lowtide.train import rng
from lowtide.train.checkpoint import load_weights, save_checkpoint
from lowtide.train.evaluate import ALONE, Evaluation, autocast, evaluate, model_device, to_device
from lowtide.train.interrupt import Interrupted, StopRequest
from lowtide.train.log import NoLog
from lowtide.train.memory import memory_use
from lowtide.train.objective import Objective, Scores
from lowtide.train.options import TrainOptions
from lowtide.train.report import Reporter, StepView
from lowtide.train.run import Run
from lowtide.train.tensorboard import open_event_writer


@dataclass
class Position:
    """Where a run stands: all of the loop's own state, plain numbers, stored in every checkpoint."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # of this epoch so far
    errors: int = 0
    n_targets: int = 0
    train_loss: float = math.nan  # of the last whole epoch
    train_error_percent: float = math.nan
    best_error_percent: float | None = None
    seconds: float = 0.0  # of all sessions


@dataclass(frozen=True)
class Summary:
    """The result of a run. Errors in percent, of the weights after the last epoch."""

    test_loss: float
    test_error_percent: float
    n_test: int
    train_loss: float
    train_error_percent: float
    best_validation_error_percent: float | None
    epochs: int
    steps: int
    seconds: float
    peak_memory_bytes: int
    checkpoint: str


def train(
    options: TrainOptions,
    model: nn.Module,
    data: SplitData,
    objective: Objective,
    optimizer: Optimizer,
    schedule: LRScheduler,
    run: Run,
    reporter: Reporter | None = None,
    description: dict[str, str] | None = None,
    world: World = ALONE,
) -> Summary:
    """Train `model` in place from where `run` stands to the last epoch, then take the test error.

    Args:
        options: `options.epochs` must be set. The optimiser step is one batch of `options.batch_size` samples.
        model: on its device, in its dtype; called as model(*batch.inputs).
        data: train, validation (or None) and test part.
        objective: sums over a batch; the loss is their mean over all targets of the step.
        schedule: stepped once per optimiser step.
        run: an existing run folder; its newest checkpoint, if any, is continued.
        description: strings stored in each checkpoint beside the state (how to build the model, how to read a sample).
        world: the ranks that share each step; all call this function with the same arguments.

    Raises:
        RankError: the ranks were given different data or options, their weights came to differ, or one was lost.
        NonFiniteError: loss or gradient is NaN or infinite; the state before the step is in nonfinite.pt.
        CheckpointError: the checkpoint does not fit, or cannot be written; the earlier one is unharmed.
        Interrupted: Ctrl-C; the state is saved.
    """
    assert options.epochs is not None
    reporter = reporter if reporter and world.is_main else Reporter()
    device = model_device(model)
    plan = EpochPlan(len(data.train), options.batch_size, options.seed, options.accumulate, world.size)
    position = Position()
    # dropout and whatever else the model draws: from here on the global generators are the model's alone
    rng.seed(derive_seed(options.seed, "train", *([world.rank] if world.rank else [])))

    parts = {"training": data.train, "validation": data.validation or (), "test": data.test}
    sizes = {f"number of {name} samples": len(part) for name, part in parts.items()}
    world.check_same({**sizes, **_what_decides(options)}, "lowtide train")
    # one rank reads, for the others may not see its disk, and must not see another checkpoint
    saved = world.from_main(run.load_last() if world.is_main else None)
    if saved is not None:
        load_weights(model, saved["model"], str(run.last))
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        position = Position(**saved["position"])
        _restore_generators(saved, world, options.seed, reporter)
        reporter.note(f"continuing {run.folder} at epoch {position.epoch + 1}, step {position.step}")
        if saved["threads"] != torch.get_num_threads():
            reporter.note(
                f"note: the run used {saved['threads']} thread(s), now {torch.get_num_threads()}; "
                "sums in another order differ in their last bits"
            )
    replica = share_gradients(model, world)
    started = time.perf_counter() - position.seconds

    with (
        run.open_log(saved["log"] if saved else None) if world.is_main else NoLog() as log,
        open_event_writer(run.folder, options.tensorboard and world.is_main, position.step) as events,
        StopRequest() as stop,
        reporter,
    ):
        reporter.begin(options.epochs, plan.steps)

        def state() -> dict[str, Any]:
            generators = world.gather(rng.capture(own_gpu=world.size > 1))
            return {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "position": dataclasses.asdict(position),
                "rng": generators[0],
                "rng_of_other_ranks": generators[1:],
                # the log must be on the disk before a checkpoint says how long it is
                "log": log.flush(),
                "threads": torch.get_num_threads(),
                "description": description or {},
            }

        def save(path: Path, content: dict[str, Any]) -> None:
            if world.is_main:
                save_checkpoint(path, content)

        def score(part: BatchDataset) -> Evaluation:
            # each rank's batch norms have seen other samples: all take the statistics of rank 0, as a checkpoint does
            world.copy_from_main(list(model.buffers()))
            return evaluate(model, part, objective, options.eval_batch_size, options.precision, options.workers, world)

        def backward(batch: Batch, n_targets: int, last: bool) -> Scores:
            """The batch's part of the step's gradient, which is that of the mean over `n_targets` of all ranks."""
            with sending(replica, last):
                with autocast(options.precision, device):
                    scores = objective(replica(*batch.inputs), batch)
                # outside autocast, as torch asks; over ranks a mean of gradients is taken, where their sum is wanted
                (scores.loss_sum / (n_targets / world.size)).backward()
            return scores

        def settle_buckets(batch: Batch, n_targets: int) -> None:
            """One backward in advance, of which nothing is kept.

            DistributedDataParallel lays its buckets out anew after its first backward, and from three ranks on a place
            in a bucket decides in which order the ranks' numbers are added. So a resumed run gets the layout that the
            run had.
            """
            generators, buffers = rng.capture(own_gpu=True), [buffer.clone() for buffer in model.buffers()]
            backward(batch, n_targets, last=True)
            rng.restore(generators)
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)

        settled = world.size <= 2
        while position.epoch < options.epochs:
            model.train()
            epoch_started, epoch_targets = time.perf_counter(), 0
            # the order of an epoch is a function of seed and epoch: going on in the middle means starting later in it
            steps = plan.keys(position.epoch, world.rank, start=position.step_in_epoch)
            batches = iter(make_loader(data.train, [key for step in steps for key in step], options.workers))
            lr = schedule.get_last_lr()[0]
            for step_keys in steps:
                step_started = time.perf_counter()
                # all micro-batches first: the mean is over the targets of the whole step, so their number comes first
                micro_batches = [to_device(next(batches), device, options.precision) for _ in step_keys]
                n_targets = int(world.sum([sum(batch.n_targets for batch in micro_batches)])[0])
                if not settled:
                    settle_buckets(micro_batches[0], n_targets)
                    settled = True
                optimizer.zero_grad(set_to_none=True)
                loss_sum = torch.zeros((), device=device, dtype=torch.float64)
                errors = torch.zeros((), device=device, dtype=torch.float64)
                for i, batch in enumerate(micro_batches, start=1):
                    scores = backward(batch, n_targets, last=i == len(micro_batches))
                    loss_sum += scores.loss_sum.detach()
                    errors += scores.errors
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                if position.step == 0:
                    _warn_of_missing_gradients(model)
                norm = nn.utils.get_total_norm(gradients)

                # one transfer from the device per step, before the weights change: a bad step must not reach them
                numbers = torch.stack([loss_sum, errors, norm.to(torch.float64)]).tolist()
                # the norm is that of the averaged gradient, and alike on every rank
                *numbers[:2], wish_to_stop = world.sum([*numbers[:2], stop.requested])
                loss, gradient_norm = numbers[0] / n_targets, numbers[2]
                if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
                    indices = torch.cat(world.gather(torch.cat([batch.indices for batch in micro_batches])))
                    save(run.nonfinite, state() | {"indices": indices})
                    raise NonFiniteError(_describe_nonfinite(position, loss, gradient_norm, indices.tolist(), run))
                lr = schedule.get_last_lr()[0]
                optimizer.step()
                schedule.step()

                position.step += 1
                position.step_in_epoch += 1
                position.loss_sum += numbers[0]
                position.errors += int(numbers[1])
                position.n_targets += n_targets
                position.seconds = time.perf_counter() - started
                epoch_targets += n_targets
                memory = memory_use(device)
                view = StepView(
                    position.epoch,
                    position.step_in_epoch,
                    loss,
                    100 * position.errors / position.n_targets,
                    n_targets / (time.perf_counter() - step_started),
                    memory.now,
                    memory.peak,
                )
                reporter.step(view)
                if position.step % options.log_every == 0:
                    row = {
                        "epoch": position.epoch,
                        "step": position.step,
                        "lr": lr,
                        "loss": loss,
                        "error_percent": 100 * numbers[1] / n_targets,
                        "gradient_norm": gradient_norm,
                        "seconds": position.seconds,
                        "samples_per_second": view.samples_per_second,
                        "memory_bytes": memory.now,
                    }
                    log.event("step", row)
                    events.add("step", row, position.step)
                if options.check_ranks_every and position.step % options.check_ranks_every == 0:
                    where = f"step {position.step}, epoch {position.epoch + 1}"
                    check_equal(model.named_parameters(), world, where)
                    if options.sync_batch_norm:
                        check_equal(model.named_buffers(), world, where)
                # at an epoch's end the checkpoint waits for the validation, which belongs to the epoch
                if position.step_in_epoch < plan.steps:
                    # a wish that came during the step is heard in the next, where the ranks can agree on it
                    if wish_to_stop or (stop.requested and world.size == 1):
                        save(run.last, state())
                        raise Interrupted(_describe_stop(position, run))
                    if position.step % options.checkpoint_every == 0:
                        save(run.last, state())

            train_seconds = time.perf_counter() - epoch_started
            checked, improved = None, False
            if data.validation is not None:
                checked = score(data.validation)
                best = position.best_error_percent
                improved = best is None or checked.error_percent < best
                position.best_error_percent = checked.error_percent if improved else best
            position.train_loss = position.loss_sum / position.n_targets
            position.train_error_percent = 100 * position.errors / position.n_targets
            position.seconds = time.perf_counter() - started
            memory = memory_use(device)
            row = {
                "epoch": position.epoch,
                "step": position.step,
                "lr": lr,
                "train_loss": position.train_loss,
                "train_error_percent": position.train_error_percent,
                "validation_loss": checked.loss if checked else None,
                "validation_error_percent": checked.error_percent if checked else None,
                "best_validation_error_percent": position.best_error_percent,
                "seconds": position.seconds,
                "samples_per_second": epoch_targets / train_seconds,
                "memory_bytes": memory.now,
                "peak_memory_bytes": memory.peak,
            }
            log.event("epoch", row)
            events.add("epoch", row, position.step)
            reporter.epoch(row)

            # the next epoch begins with empty sums; then the checkpoint, which so stands at its first step
            position.epoch += 1
            position.step_in_epoch = 0
            position.loss_sum, position.errors, position.n_targets = 0.0, 0, 0
            content = state()
            if improved:
                save(run.best, content)
            save(run.last, content)

            if any(world.gather(stop.requested)):
                raise Interrupted(_describe_stop(position, run))

        # only now, and once, the test set
        tested = score(data.test)
        position.seconds = time.perf_counter() - started
        row = {"step": position.step, "loss": tested.loss, "error_percent": tested.error_percent}
        log.event("test", row)
        events.add("test", row, position.step)
        log.flush()

    summary = Summary(
        test_loss=tested.loss,
        test_error_percent=tested.error_percent,
        n_test=tested.n_targets,
        train_loss=position.train_loss,
        train_error_percent=position.train_error_percent,
        best_validation_error_percent=position.best_error_percent,
        epochs=position.epoch,
        steps=position.step,
        seconds=position.seconds,
        peak_memory_bytes=memory_use(device).peak,
        checkpoint=str(run.last),
    )
    if world.is_main:
        run.write_summary(dataclasses.asdict(summary))
    return summary


def synchronise_batch_norm(model: nn.Module) -> None:
    """Every batch norm takes the statistics of all ranks; parameters and keys stay the same."""
    # torch's own is faster where the block runs plain, but refuses the CPU
    kind = nn.SyncBatchNorm if model_device(model).type == "cuda" else SyncBatchNorm
    kind.convert_sync_batchnorm(model)


def _what_decides(options: TrainOptions) -> dict[str, object]:
    """The options that a number depends on: those that no rank may have otherwise."""
    named = dataclasses.asdict(options).items()
    return {f"--{name.replace('_', '-')}": value for name, value in named if name not in options.changeable} | {
        name: getattr(options, name.strip("-").replace("-", "_"))
        for name in ("--eval-batch-size", "--checkpoint-every", "--check-ranks-every")  # who meets whom, and when
    }


def _restore_generators(saved: dict[str, Any], world: World, seed: int, reporter: Reporter) -> None:
    """Each rank's own generators; those of a rank that the run did not have begin anew."""
    generators = [saved["rng"], *saved.get("rng_of_other_ranks", ())]
    if len(generators) != world.size:
        reporter.note(
            f"note: the run used {len(generators)} process(es), now {world.size}; the samples of each step stay the "
            "same, but dropout and each process's batch norm do not"
        )
    if world.rank < len(generators):
        rng.restore(generators[world.rank])
    else:
        rng.seed(derive_seed(seed, "train", world.rank, saved["position"]["step"]))


def _warn_of_missing_gradients(model: nn.Module) -> None:
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        warnings.warn(f"{len(missing)} parameters got no gradient, such as {missing[0]}", stacklevel=3)


def _describe_stop(position: Position, run: Run) -> str:
    return f"stopped after step {position.step}, epoch {position.epoch + 1}; the state is in {run.last}"


def _describe_nonfinite(position: Position, loss: float, gradient_norm: float, indices: list[int], run: Run) -> str:
    some = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return describe(
        expected="a finite loss and gradient",
        got=f"loss {loss}, gradient norm {gradient_norm} for {len(indices)} samples ({some})",
        where=f"step {position.step + 1}, epoch {position.epoch + 1}",
        fix=f"the state before the step is in {run.nonfinite}; lower --lr or look at these samples",
    )
