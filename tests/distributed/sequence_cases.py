"""Small models and inputs of the sequence parallel tests, and two steps of training on them: whole, or by one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.distributed import reduce_gradients, sequence_parallel, split_sequence
from lowtide.models import SequenceModel
from lowtide.nn import SGConv


@dataclass(frozen=True)
class Case:
    """B rows of L positions. `cuts`: positions per rank where it is not `split_sequence` that cuts."""

    name: str
    L: int
    keywords: dict[str, Any]
    lengths: tuple[int, ...] | None = None
    side: str = "right"
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    layer: bool = False
    B: int = 3
    levels: tuple[str, ...] = ("none", "pointwise", "layer", "block")


CASES = [
    Case("two-sided, mean", 37, {"bidirectional": True, "postact": "glu", "d_model": 6, "pool": "mean"}),
    Case(
        "rows of different length, left",
        17,
        {"prenorm": False, "norm": "layer", "pool": None, "channels": 2, "d_model": 5},
        (17, 4, 0),
        "left",
    ),
    # on four ranks: two without a channel or without a position
    Case(
        "fewer features than ranks, last, dropout",
        5,
        {"pool": "last", "dropout": 0.4, "d_model": 2, "bidirectional": True},
        (5, 3, 0),
    ),
    Case(
        "tokens, batch norm over padding, power decay, cut by hand",
        29,
        {"embedding": 11, "pool": None, "decay": "power", "decay_min": 0.2, "decay_max": 0.6, "combine": "sum",
         "d_model": 6, "prenorm": False},
        (29, 20, 3),
        cuts={2: (28, 1), 4: (0, 9, 1, 19)},
    ),
    Case(
        "layer (B, L, H), two channels, layer norm",
        23,
        {"d_model": 5, "transposed": False, "channels": 2, "bidirectional": True, "norm": True},
        (23, 7, 12),
        layer=True,
        levels=("none", "pointwise", "layer"),
    ),
    Case(
        "layer (B, H, L), linear, longer kernel than rows",
        6,
        {"d_model": 7, "l_max": 300, "linear": True},
        layer=True,
        levels=("none", "layer"),
    ),
]  # fmt: skip


def build(case: Case, dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    settings = {"l_max": 40, "kernel_dim": 4} | case.keywords
    if case.layer:
        model: nn.Module = SGConv(**settings)
    else:
        model = SequenceModel(3, 4, n_layers=2, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def inputs(case: Case, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(B, L, ...), or (B, H, L) for a layer that is `transposed`."""
    generator = torch.Generator().manual_seed(100 + step)
    if "embedding" in case.keywords:
        return torch.randint(case.keywords["embedding"], (case.B, case.L), generator=generator)
    width = case.keywords["d_model"] if case.layer else 3
    x = torch.randn(case.B, case.L, width, dtype=torch.float64, generator=generator).to(dtype)
    return x.transpose(1, 2).contiguous() if time_dim(case) == 2 else x


def time_dim(case: Case) -> int:
    return 2 if case.layer and case.keywords.get("transposed", True) else 1


def cut(x: Tensor, case: Case, rank: int, world_size: int, dim: int) -> Tensor:
    if world_size in case.cuts:
        return x.split(list(case.cuts[world_size]), dim)[rank]
    return split_sequence(x, dim=dim)


def train(
    case: Case, level: str, rank: int | None = None, world_size: int = 1, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Two steps of SGD: outputs, gradients of inputs and parameters, buffers, generator, eval output.

    With a rank: by that rank, on its positions; names that begin with "part" are then parts of a whole.
    """
    split = rank is not None
    # ranks start from different weights: sequence_parallel makes them equal
    model = build(case, dtype, seed=3 + (rank or 0))
    model.set_recompute(level)
    if split:
        model = sequence_parallel(model)
    model.train()
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    pooled = case.keywords.get("pool", "") is not None and not case.layer
    dim = time_dim(case)
    seen: dict[str, Tensor] = {}
    for step in range(2):
        x = inputs(case, step, dtype)
        if split:
            x = cut(x, case, rank, world_size, dim)
        if x.is_floating_point():
            x = x.clone().requires_grad_()
        optimizer.zero_grad()
        y = model(x, lengths, case.side)
        seen[f"{'' if pooled else 'part '}y{step}"] = y.detach().clone()
        w = projection(y, case, split, dim, pooled)
        (y * (cut(w, case, rank, world_size, dim) if split and not pooled else w)).sum().backward()
        if split:
            reduce_gradients(model)
        if x.is_floating_point():
            seen[f"part x.grad{step}"] = x.grad
        seen |= {f"{name}.grad{step}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    seen |= {name: buffer.clone().double() for name, buffer in model.named_buffers()}
    seen["rng"] = torch.get_rng_state().double()
    model.eval()
    with torch.no_grad():
        x = inputs(case, 5, dtype)
        y = model(cut(x, case, rank, world_size, dim) if split else x, lengths, case.side)
    seen[f"{'' if pooled else 'part '}eval"] = y
    return seen


def projection(y: Tensor, case: Case, split: bool, dim: int, pooled: bool) -> Tensor:
    """The same random weights for the whole output, however it is cut."""
    shape = list(y.shape)
    if split and not pooled:
        shape[dim] = case.L
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)


def join(parts: list[dict[str, Tensor]], case: Case) -> dict[str, Tensor]:
    """What the ranks found, put together; what each has whole must be the same numbers on all of them."""
    joined: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        if name.startswith("part "):
            joined[name] = torch.cat([part[name] for part in parts], time_dim(case))
        else:
            for rank, part in enumerate(parts):
                assert torch.equal(part[name], first), f"{name} differs on rank {rank}"
            joined[name] = first
    return joined
