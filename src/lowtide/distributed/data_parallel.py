"""Data parallel training: every rank has the whole model and its own samples; the gradients are averaged.

The work is done by torch's `DistributedDataParallel`. Here stands how it is set up, and what it leaves open: the mean
over the targets of all ranks, the order of its buckets after a resume, and whether the ranks still agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.distributed.world import World
from lowtide.errors import RankError, describe


def share_gradients(model: nn.Module, world: World) -> nn.Module:
    """`model` such that a backward through it leaves every rank with the mean of all ranks' gradients.

    The parameters and buffers of rank 0 are copied to all. Gradients are views of the buckets that are sent, so they
    take no memory twice. Buffers stay each rank's own from then on: `World.copy_from_main` before they are used. Alone,
    the model itself.
    """
    if world.size == 1:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=None if device.index is None else [device.index],
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def sending(model: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Around forward and backward: whether gradients are averaged in this backward, or only added to those before."""
    return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


def check_equal(tensors: Iterable[tuple[str, Tensor]], world: World, where: str) -> None:
    """Raise `RankError` on every rank unless named tensors have the same bits on all of them.

    Cost: one pass over the tensors and one message of 16 bytes per tensor. What is compared is the sum of each tensor's
    bits, read as whole numbers: two different tensors with the same sum would pass.
    """
    if world.size == 1:
        return
    named = list(tensors)
    sums = torch.stack([_sum_of_bits(tensor) for _, tensor in named]).cpu()
    # the largest of s and of -s: equal sums are those whose largest is their smallest
    both = torch.cat([sums, -sums])
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX)
    largest, smallest = both[: len(sums)], -both[len(sums) :]
    different = (largest != smallest).nonzero().flatten().tolist()
    if different:
        raise RankError(
            describe(
                expected="the same values on every rank",
                got=f"{len(different)} of {len(named)} tensors that differ, the first {named[different[0]][0]}",
                where=where,
                fix="something changes the weights on one rank alone; go back to the last checkpoint",
            )
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(whole).sum(dtype=torch.int64)
