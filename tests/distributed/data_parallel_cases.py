"""Data parallel training of small networks in float64: on ranks, and as one process would do it.

Three seeds decide everything: of the weights (rank 0's count), of the data, of the loss's projection.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.data.batches import _share_out
from lowtide.distributed.data_parallel import sending, share_gradients
from lowtide.distributed.world import World
from lowtide.lean import batch_norm as lean_batch_norm
from lowtide.models import DenseNet, SequenceModel
from lowtide.nn import SyncBatchNorm

Seen = dict[str, Tensor]
STEPS = 3
LEVELS = ("none", "pointwise", "layer", "block")


class Untrained(nn.Module):
    """A network beside a layer that it does not use."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.unused = inside, nn.Linear(3, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inside(*inputs)


@dataclass(frozen=True)
class Case:
    """One network in one mode. `batch` samples per step are shared out over ranks times micro-batches."""

    name: str
    network: str
    level: str = "pointwise"
    sync: str = ""  # "", "lowtide" or "torch": whose SyncBatchNorm
    batch: int = 11
    accumulate: int = 1
    ddp: dict[str, Any] | None = field(default=None, hash=False)  # None: as lowtide's training sets it up
    unused: bool = False


def build(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if case.network == "sequence":
        model: nn.Module = SequenceModel(2, 3, 4, 2, 16, kernel_dim=4, bidirectional=True, recompute=case.level)
    elif case.network == "torchvision":
        model = torchvision.models.DenseNet(3, (2, 2), 4, bn_size=2, num_classes=3)
    else:
        settings = {
            "dense": {"block_config": (2, 2)},
            "stem": {"block_config": (2, 1), "small_inputs": False},
            "plain layers": {"block_config": (2, 1), "bn_size": None},
        }[case.network]
        model = DenseNet(3, num_init_features=4, num_classes=3, recompute=case.level, **settings)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    model = model.double()
    if case.network == "torchvision" and case.level != "none":
        lowtide.convert(model, recompute=case.level)
    return Untrained(model) if case.unused else model


def inputs(case: Case, step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(100 + step)
    if case.network == "sequence":
        x = torch.randn(case.batch, 16, 2, dtype=torch.float64, generator=draw)
        return x, torch.randint(3, 17, (case.batch,), generator=draw)
    side = {"stem": 16, "torchvision": 32}.get(case.network, 8)
    return (torch.randn(case.batch, 3, side, side, dtype=torch.float64, generator=draw),)


def share(case: Case, step: int, place: int, shares: int) -> tuple[list[int], tuple[Tensor, ...]]:
    """The samples of one share of a step, and their numbers in it."""
    rows = list(_share_out(range(case.batch), shares)[place])
    return rows, tuple(x[rows] for x in inputs(case, step))


def loss_sum(case: Case, step: int, rows: list[int], output: Tensor) -> Tensor:
    """A fixed random projection: a weight for each sample's each output."""
    weights = torch.randn(case.batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (output * weights[rows]).sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def note_gradients(seen: Seen, model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        assert ("unused" in name) == (parameter.grad is None or not parameter.grad.any()), name
        if parameter.grad is not None and "unused" not in name:
            seen[f"grad {step} {name}"] = parameter.grad.clone()


def note_end(seen: Seen, model: nn.Module, case: Case) -> None:
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        seen["eval output"] = model(*inputs(case, 99))


def on_ranks(case: Case, rank: int, world_size: int, fault: str = "") -> tuple[Seen, dict[str, int]]:
    """Train as a rank; what is seen there, and the traffic of the last step."""
    model = build(case, seed=0 if rank == 0 else 50 + rank)  # the others' weights are overwritten
    if case.sync:
        kind = SyncBatchNorm if case.sync == "lowtide" else nn.SyncBatchNorm
        model = kind.convert_sync_batchnorm(model)
    world, traffic = World(rank, world_size), Traffic()
    if case.sync == "torch":
        # DistributedDataParallel refuses torch's SyncBatchNorm on the CPU: averaged by hand
        world.copy_from_main([*model.parameters(), *model.buffers()])
        replica = model
    elif case.ddp is None:
        replica = share_gradients(model, world)
    else:
        with quiet_about_unused(case):
            replica = DistributedDataParallel(model, **case.ddp)
    if isinstance(replica, DistributedDataParallel):
        traffic.watch(replica)
    optimizer, seen = optimizer_of(model), {}
    for step in range(STEPS):
        traffic.clear()
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case.accumulate):
            place = rank * case.accumulate + micro
            rows, x = share(case, step, place, world_size * case.accumulate)
            last = micro == case.accumulate - 1 or fault == "no_sync forgotten"
            if case.ddp and case.ddp.get("static_graph") and step == 0:
                last = True  # torch's static graph is recorded in the first step, and fails under no_sync
            n = len(rows) * world_size * case.accumulate if fault == "weight of the share" else case.batch
            with traffic.counted(), sending(replica, last), quiet_about_unused(case):
                loss = loss_sum(case, step, rows, replica(*x))
                (loss * world_size / n).backward()
            total += loss.detach()
        if case.sync == "torch":
            for parameter in model.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= world_size
        distributed.all_reduce(total)
        seen[f"loss {step}"] = total / case.batch
        note_gradients(seen, model, step)
        optimizer.step()
    note_end(seen, model, case)
    return seen, traffic.bytes


@contextmanager
def quiet_about_unused(case: Case) -> Iterator[None]:
    """torch says that a search for unused parameters found none, or is not needed with a static graph."""
    with warnings.catch_warnings():
        if case.ddp and case.ddp.get("find_unused_parameters"):
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            warnings.filterwarnings("ignore", message="You passed find_unused_parameters=true")
        yield


class Traffic:
    """Bytes and messages handed to collectives: by Python, seen in passing; by DDP, told by its hook."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def clear(self) -> None:
        self.bytes = {"gradients": 0, "statistics": 0, "messages of statistics": 0}

    def watch(self, replica: DistributedDataParallel) -> None:
        def hook(state, bucket):  # DDP refuses annotations that are strings, as all in this file are
            self.bytes["gradients"] += bucket.buffer().nbytes
            return allreduce_hook(None, bucket)

        replica.register_comm_hook(None, hook)

    @contextmanager
    def counted(self) -> Iterator[None]:
        original = distributed.all_reduce

        def counting(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if not keywords.get("async_op"):  # those are the hook's, counted there
                self.bytes["statistics"] += tensor.nbytes
                self.bytes["messages of statistics"] += 1
            return original(tensor, *arguments, **keywords)

        distributed.all_reduce = counting
        try:
            yield
        finally:
            distributed.all_reduce = original


def alone(case: Case, world_size: int) -> Seen:
    """The same training by one process, plain: the joined batch with `sync`, else each share by itself."""
    plain = Case(**{**vars(case), "level": "none"})
    model = build(plain, seed=0)
    optimizer, seen = optimizer_of(model), {}
    shares = case.accumulate if case.sync else world_size * case.accumulate
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for place in range(shares):
            if case.sync:  # the joined micro-batch of all ranks
                joined = [share(case, step, r * case.accumulate + place, world_size * case.accumulate)
                          for r in range(world_size)]  # fmt: skip
                rows = [row for part, _ in joined for row in part]
                x = tuple(torch.cat(parts) for parts in zip(*(x for _, x in joined), strict=True))
            else:
                rows, x = share(case, step, place, shares)
            if place == case.accumulate and not case.sync:
                # rank 0 is done: its statistics are kept, the other ranks' are dropped
                state = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = loss_sum(case, step, rows, model(*x))
            (loss / case.batch).backward()
            total += loss.detach()
        if not case.sync and shares > case.accumulate:
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
        seen[f"loss {step}"] = total / case.batch
        note_gradients(seen, model, step)
        optimizer.step()
    note_end(seen, model, plain)
    return seen


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A wrong implementation, inside a rank."""
    original: Callable[..., Any] = lean_batch_norm.correction
    patched: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    if fault == "reduction of the gradient of gamma":

        def forgetful(norm, at, sums, sums_x, count, needs_input=True):
            own = sums_x.clone()
            only_first = copy.copy(norm)
            reduce = norm.reduce

            def half(payload: Tensor) -> None:
                reduce(payload)
                payload[len(own) :] = own.double()

            object.__setattr__(only_first, "reduce", None if reduce is None else half)
            return original(only_first, at, sums, sums_x, count, needs_input)

        from lowtide.lean import dense_block, transition

        for owner in (dense_block, transition):
            patch(owner, "correction", forgetful)
    elif fault == "reduction of the moments":
        from lowtide.lean import dense_block

        moments = dense_block.batch_moments
        patch(dense_block, "batch_moments", lambda kernels, x, reduce: moments(kernels, x, None))
    try:
        yield
    finally:
        for owner, name, value in reversed(patched):
            setattr(owner, name, value)
