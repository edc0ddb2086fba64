"""Batch norm and convolution of a described layer (`lowtide.parts`), in ordinary autograd."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import BatchNorm, Convolution


def batch_norm(x: Tensor, norm: BatchNorm) -> Tensor:
    """`torch.nn.BatchNorm*`: running statistics move once per call in training."""
    momentum = norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.uses_batch, momentum or 0.0, norm.eps
    )


def convolve(x: Tensor, conv: Convolution, stride: Sequence[int] | int = 1) -> Tensor:
    """Convolution that keeps the size: zero padding of half the kernel."""
    padding = [size // 2 for size in conv.weight.shape[2:]]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    return function(x, conv.weight, conv.bias, stride, padding)
