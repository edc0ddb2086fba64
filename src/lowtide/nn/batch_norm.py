"""Batch norm of one process or of several: `SyncBatchNorm`, and batch norms as plain tensors and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowtide import parts
from lowtide.dense_functions import batch_norm
from lowtide.errors import ArgumentError, UnsupportedError, describe


@dataclass(frozen=True)
class AllReduce:
    """Sums a vector over a process group in place; `None` is the default group."""

    group: Any

    def __call__(self, vector: Tensor) -> None:
        torch.distributed.all_reduce(vector, group=self.group)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over (N, c, *S) with the statistics of all ranks of a process group; on the CPU too.

    torch's own refuses the CPU, and so does DistributedDataParallel with it. Inside a lean block either is part of the
    block's node: per layer two sums over the ranks in the forward (of 2c + 1 float64 numbers for the c = k new channels
    and for the c = b*k bottleneck channels) and two in the backward (of 2c, for the c channels that norm1 reads and for
    the b*k of norm2). Called by itself it is ordinary autograd: a count, two sums of c numbers, and two more in the
    backward. In eval mode, and in a group of one, it is batch norm.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as for `torch.nn.BatchNorm2d`.
        process_group: whose statistics; None: all ranks.

    Exactness: batch norm of the joined batch, whatever each rank's share, within rounding; sums are taken in float64.
    Raises: ArgumentError for a map without channels.
    Source: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            got = str(tuple(input.shape))
            raise ArgumentError(describe(expected="a map (N, c, *S)", got=got, where="SyncBatchNorm"))

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return batch_norm(input, as_parts(self))

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`module` with every batch norm replaced, as torch's function of this name: same parameters, buffers, keys.

        Raises:
            UnsupportedError: a batch norm of a class of its own, which may do more than that.
        """
        if isinstance(module, _BatchNorm):
            if type(module) not in BATCH_NORMS:
                got = type(module).__name__
                raise UnsupportedError(describe(expected="torch's batch norms", got=got, where="SyncBatchNorm"))
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for name, tensor in {**module._parameters, **module._buffers}.items():
                setattr(made, name, tensor)
            return made.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


SYNC_BATCH_NORMS = (nn.SyncBatchNorm, SyncBatchNorm)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *SYNC_BATCH_NORMS)


def as_parts(module: _BatchNorm) -> parts.BatchNorm:
    """Its tensors and numbers, and how its statistics are summed over ranks, if they are."""
    tracked = module.track_running_stats
    return parts.BatchNorm(
        module.weight,
        module.bias,
        module.running_mean if tracked else None,
        module.running_var if tracked else None,
        module.num_batches_tracked if tracked else None,
        module.eps,
        module.momentum,
        module.training,
        _reduce(module),
    )


def _reduce(module: nn.Module) -> AllReduce | None:
    if not isinstance(module, SYNC_BATCH_NORMS) or not module.training:
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size(module.process_group) < 2:
        return None
    return AllReduce(module.process_group)


def call_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x); torch's SyncBatchNorm, which refuses a map on the CPU in training, by plain tensor calls there."""
    # with a hook it must be called itself
    if type(norm) is nn.SyncBatchNorm and x.device.type == "cpu" and not (norm._forward_hooks or norm._backward_hooks):
        return batch_norm(x, as_parts(norm))
    return norm(x)
