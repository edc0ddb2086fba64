"""Training on sharded models, and the same by one process that runs each rank's part by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowtide.distributed import load_sharded, save_sharded, shard
from lowtide.models import DenseNet, SequenceModel

NETWORKS = ("dense, small images", "dense, large images, dropout", "sequence", "sequence, postnorm, tokens")
LEVELS = ("none", "pointwise", "layer", "block")


def build(name: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    if name == "dense, small images":
        model: nn.Module = DenseNet(5, (2, 3, 2), num_init_features=6, num_classes=4)
    elif name == "dense, large images, dropout":
        model = DenseNet(4, (2, 2), num_init_features=6, num_classes=4, small_inputs=False, drop_rate=0.2)
    elif name == "sequence":
        model = SequenceModel(3, 4, 8, 2, 40, kernel_dim=4, bidirectional=True, postact="glu", channels=2)
    else:
        model = SequenceModel(
            3, 4, 6, 2, 40, kernel_dim=4, prenorm=False, norm="layer", embedding=9, pool="last", decay="power",
            decay_min=0.2, decay_max=0.6,
        )  # fmt: skip
    return model.double()


def batch(name: str, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    if name.startswith("dense"):
        size = 12 if "small" in name else 40
        x = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
    elif "tokens" in name:
        x = torch.randint(9, (rows, 21), generator=generator)
    else:
        x = torch.randn(rows, 21, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_sharded(
    name: str, level: str, rank: int, world_size: int, divide: Callable[[nn.Module], object] = shard
) -> dict[str, Tensor]:
    """Two steps on this rank's rows: loss, every gradient, this rank's buffers, the weights behind them."""
    model = build(name)
    divide(model)
    model.set_recompute(level)
    divided = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())
    assert divided > 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: dict[str, Tensor] = {}
    for step in range(2):
        x, target = (t.chunk(world_size)[rank] for t in batch(name, step))
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        seen[f"loss{step}"] = loss.detach()
        seen |= {f"{n}.grad{step}": whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    seen |= {n: b.clone().double() for n, b in model.named_buffers()}
    return seen | {n: whole(p) for n, p in model.named_parameters()}


def train_by_parts(name: str, world_size: int) -> list[dict[str, Tensor]]:
    """What each rank should find: one process runs each rank's rows by themselves and averages the gradients."""
    models = [build(name) for _ in range(world_size)]
    for model in models:
        model.set_recompute("none")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    seen: list[dict[str, Tensor]] = [{} for _ in models]
    for step in range(2):
        x, target = batch(name, step)
        for rank, model in enumerate(models):
            model.zero_grad()
            torch.manual_seed(100 * step + rank)
            loss = nn.functional.cross_entropy(model(x.chunk(world_size)[rank]), target.chunk(world_size)[rank])
            loss.backward()
            seen[rank][f"loss{step}"] = loss.detach()
        for n, _ in models[0].named_parameters():
            grads = [model.get_parameter(n).grad for model in models]
            mean = torch.stack([g for g in grads if g is not None]).mean(0)
            for rank, model in enumerate(models):
                model.get_parameter(n).grad = mean.clone()
                seen[rank][f"{n}.grad{step}"] = mean
        for optimizer in optimizers:
            optimizer.step()
    for rank, model in enumerate(models):
        seen[rank] |= {n: b.clone().double() for n, b in model.named_buffers()}
        seen[rank] |= {n: p.detach().clone() for n, p in model.named_parameters()}
    return seen


def part_independent(kind: str) -> nn.Module:
    """A network whose loss on a batch does not depend on how the batch is divided."""
    if kind == "sequence":
        return build("sequence, postnorm, tokens")
    return nn.SyncBatchNorm.convert_sync_batchnorm(build("dense, small images"))


def name_of(kind: str) -> str:
    return "sequence, postnorm, tokens" if kind == "sequence" else "dense, small images"


def resume(kind: str, folder: str, rank: int, world_size: int, steps: range, *, load: bool, save: bool) -> list[float]:
    """Mean losses of some steps of one training, from and to a checkpoint."""
    model = part_independent(kind)
    if world_size > 1:
        shard(model)
    optimizer: torch.optim.Optimizer
    if kind == "sequence":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    path = Path(folder, kind)
    if load:
        with torch.no_grad():  # what is not read would show
            for p in model.parameters():
                p.mul_(0.5)
        assert load_sharded(path, model, optimizer)["step"] == steps.start
    losses = []
    for step in steps:
        x, target = (t.chunk(world_size)[rank] for t in batch(name_of(kind), step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / world_size)
    if save:
        save_sharded(path, model, optimizer, step=steps.stop)
    return losses
