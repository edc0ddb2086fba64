"""What a model is trained for: sums over a batch that can be added up over micro-batches, ranks and epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from lowtide.data.batches import Batch


class Scores(NamedTuple):
    """loss_sum: scalar, with a graph in training. errors: scalar, how many targets were missed."""

    loss_sum: Tensor
    errors: Tensor


Objective = Callable[[Tensor, Batch], Scores]


def classification(output: Tensor, batch: Batch) -> Scores:
    """Cross entropy and wrong answers. output: (B, n_classes); batch.target: (B,) int64."""
    loss_sum = F.cross_entropy(output, batch.target, reduction="sum")
    return Scores(loss_sum, (output.detach().argmax(dim=1) != batch.target).sum())
