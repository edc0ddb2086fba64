"""Sequence parallel training: each rank holds a part of every sequence, in time.

    model = sequence_parallel(SequenceModel(...), mesh)     # or a process group; None: all ranks
    x = split_sequence(x, mesh)                             # or load this rank's positions only
    loss(model(x), split_sequence(target, mesh)).backward()
    reduce_gradients(model)
    optimizer.step()

What looks along time is exchanged: before the long convolution an all-to-all gives each rank the whole length of H / P
features, whose kernels alone it makes; behind it another one gives the positions back. Batch norm takes its statistics
from all ranks, pooling its sum. Everything else acts on a position by itself and stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lowtide.distributed.exchange import GroupSplit
from lowtide.errors import ArgumentError, UnsupportedError, describe

Model = TypeVar("Model", bound=nn.Module)
Group = Any  # torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None for all ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a sequence together; see `lowtide.sequence_split.SequenceGroup`."""

    group: Any

    def split(self, x: Tensor, time_dim: int, lengths: Tensor | None) -> GroupSplit:
        """Who holds how many positions: one all-gather of three numbers.

        Raises:
            ArgumentError: the ranks hold batches of different sizes, or were given different lengths.
        """
        check = -1
        if lengths is not None:
            weights = torch.arange(1, len(lengths) + 1, device=lengths.device)
            check = int((lengths.long() * weights).sum())
        held, batches, checks = _tell((x.shape[time_dim], x.shape[0], check), x.device, self.group)
        where = "a sequence split over ranks"
        if len(set(batches)) > 1:
            got = f"batches of {batches}"
            raise ArgumentError(describe(expected="the same rows on every rank", got=got, where=where))
        if len(set(checks)) > 1:
            fix = "give every rank the lengths of the whole rows"
            got = "lengths that differ"
            raise ArgumentError(describe(expected="the same lengths on every rank", got=got, where=where, fix=fix))
        return GroupSplit(self.group, distributed.get_rank(self.group), tuple(held))

    def __deepcopy__(self, memo: object) -> Ranks:
        return self  # a copy of a model belongs to the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        fix = "save its state_dict, or undo with sequence_parallel(model, group) after loading"
        got = "one that is split over the ranks of a process group"
        raise UnsupportedError(describe(expected="a model of one process", got=got, where="pickle", fix=fix))


def sequence_parallel(model: Model, group: Group = None, *, broadcast: bool = True) -> Model:
    """Tell a model's long convolutions, batch norms and pooling that each rank holds a part of the time axis.

    The model is changed in place and returned. `SequenceModel`, `ResidualSGConv` and `SGConv` are called as before,
    with this rank's positions; `lengths` are those of the whole rows. Every rank must call forward and backward equally
    often; a rank may hold any number of positions, none too, and their numbers may change from call to call.

    What is trained is: with an output per position, the SUM over the ranks of what each computes from its own; with
    pooling, the loss that every rank computes from the same output. In both cases a parameter's gradient is on each
    rank its part of a sum: call `reduce_gradients` before the optimiser.

    Args:
        model: on every rank the same module; at every memory level, which may change at any time.
        group: a process group, or a DeviceMesh of one dimension (`mesh["sequence"]`); None: all ranks.
        broadcast: start from the parameters and buffers of the group's first rank.

    Raises:
        ArgumentError: nothing in the model can be split, or the mesh has several dimensions.
        UnsupportedError: no process group; a layer that looks along time and would see this rank's part alone.
    """
    where = "sequence_parallel"
    process_group = group_of(group, where)
    splittable = [module for module in model.modules() if hasattr(type(module), "sequence_group")]
    if not splittable:
        got = type(model).__name__
        raise ArgumentError(describe(expected="a model with SGConv layers", got=got, where=where))
    _check_layers(model, where)
    if broadcast:
        tensors: Iterable[Tensor] = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            for tensor in tensors:
                held = tensor.detach().contiguous()
                distributed.broadcast(held, group=process_group, group_src=0)
                if held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held)
    for module in splittable:
        module.sequence_group = Ranks(process_group)  # pyright: ignore[reportArgumentType]
    return model


def _tell(numbers: tuple[int, ...], device: torch.device, group: Any) -> list[list[int]]:
    """What every rank says, for each of the numbers."""
    mine = torch.tensor(numbers, device=device)
    everybody = mine.new_empty(distributed.get_world_size(group) * len(numbers))
    distributed.all_gather(list(everybody.split(len(numbers))), mine, group=group)
    return everybody.view(-1, len(numbers)).t().tolist()


def group_of(group: Group, where: str) -> Any:
    """The process group that is meant: that of a mesh of one dimension, or itself; None stays None, for all ranks."""
    if not distributed.is_available() or not distributed.is_initialized():
        fix = "start with torchrun and call torch.distributed.init_process_group()"
        raise UnsupportedError(describe(expected="a process group", got="none", where=where, fix=fix))
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        expected, got = "a mesh of one dimension", f"dimensions {group.mesh_dim_names or group.ndim}"
        raise ArgumentError(describe(expected=expected, got=got, where=where, fix='choose one, mesh["sequence"]'))
    return group.get_group()


def _check_layers(model: nn.Module, where: str) -> None:
    """Refuse layers that would see a part of the time axis and take it for the whole."""
    for name, module in model.named_modules():
        owner = model.get_submodule(name.rpartition(".")[0])
        if _looks_along_time(module) and not getattr(type(owner), "takes_split", False):
            raise UnsupportedError(
                describe(
                    expected="layers that act on one position, SGConv, and the norms of SequenceModel",
                    got=f"{name or 'the model'}: {type(module).__name__}, which looks along time",
                    where=where,
                    fix="keep it out of the model, or use layer norm",
                )
            )


def _looks_along_time(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):
        return any(size > 1 for size in module.kernel_size)
    return isinstance(
        module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.RNNBase | nn.MultiheadAttention
    ) and not isinstance(module, nn.SyncBatchNorm)


def split_sequence(x: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """This rank's positions of `x`, which every rank holds: a view.

    The rule is that of `torch.chunk` and of DTensor's `Shard(dim)`: ceil(L / P) positions each, the last ranks fewer or
    none. Any other split does as well, as long as ranks hold positions in their order.
    """
    process_group = group_of(group, "split_sequence")
    ranks, rank = distributed.get_world_size(process_group), distributed.get_rank(process_group)
    L = x.shape[dim]
    width = -(-L // ranks)
    start = min(rank * width, L)
    return x.narrow(dim, start, min(width, L - start))


def gather_sequence(y: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """The whole, on every rank, of which `y` is this rank's positions.

    With gradient: a loss of the result is to be the same on every rank and counts once; each rank's positions get their
    part of it without communication. Put no parameters between the result and the loss: their gradient would be whole
    on every rank, not a part of a sum as `reduce_gradients` takes it.
    """
    process_group = group_of(group, "gather_sequence")
    ((*held,),) = _tell((y.shape[dim],), y.device, process_group)
    split = GroupSplit(process_group, distributed.get_rank(process_group), tuple(held))
    whole: Any = _Gather.apply(y, split, dim)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, split: GroupSplit, dim: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        front = y.movedim(dim, 0)
        whole = front.new_empty(split.length, *front.shape[1:])
        # an all-gather would need equal pieces
        for rank, piece in enumerate(whole.split(list(split.lengths))):
            if rank == split.rank:
                piece.copy_(front)
            distributed.broadcast(piece, group=split.group, group_src=rank)
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        split: GroupSplit = ctx.split
        return grads[0].narrow(ctx.dim, split.offset, split.held), None, None


def reduce_gradients(model: nn.Module) -> None:
    """Sum every parameter's gradient over the ranks that `sequence_parallel` was given: afterwards all hold the same.

    One all-reduce per dtype, over a copy of all gradients and one number more per parameter. Call it once per step,
    after the last backward of an accumulation and before clipping and the optimiser. A parameter that has no gradient
    on any rank keeps none. Beside data parallel or sharded training (DDP or `shard` over `mesh["data"]`, this over
    `mesh["sequence"]`) each rank sums what it holds: averaging over rows and summing over positions commute.

    Raises:
        ArgumentError: the model was not given to `sequence_parallel`.
    """
    groups = [getattr(module, "sequence_group", None) for module in model.modules()]
    found = [group for group in groups if isinstance(group, Ranks)]
    if not found:
        fix = "call sequence_parallel(model, group) first"
        got = type(model).__name__
        raise ArgumentError(describe(expected="a split model", got=got, where="reduce_gradients", fix=fix))
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for (dtype, device), parameters in by_kind.items():
        sizes = [_own(p).numel() for p in parameters]
        flat = torch.zeros(sum(sizes) + len(parameters), dtype=dtype, device=device)
        *places, present = flat.split([*sizes, len(parameters)])
        for i, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
            if parameter.grad is not None:
                place.view(_own(parameter).shape).copy_(_own(parameter.grad))
                present[i] = 1
        distributed.all_reduce(flat, group=found[0].group)
        for parameter, place, count in zip(parameters, places, present.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _own(parameter.grad).copy_(place.view(_own(parameter).shape))


def _own(x: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient that may be divided."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()
