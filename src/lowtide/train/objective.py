"""What a model is trained for: sums over a batch that can be added up over micro-batches, ranks and epochs."""

from __future__ import annotations

import math
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
    """Cross entropy and wrong answers. output: (B, n_classes), or (B, L, n_classes) for a class per position;
    batch.target: (B,) or (B, L) int64."""
    loss_sum = F.cross_entropy(output.flatten(0, -2), batch.target.flatten(), reduction="sum")
    return Scores(loss_sum, (output.detach().argmax(dim=-1) != batch.target).sum())


def say_loss(loss: float, samples: str) -> str:
    """A mean cross entropy as text: in nats, or, where the samples are bytes, in bits per byte.

    >>> say_loss(1.386294, "rows"), say_loss(1.386294, "bytes")
    ('loss 1.3863', '2.0000 bits per byte')
    """
    return f"{loss / math.log(2):.4f} bits per byte" if samples == "bytes" else f"loss {loss:.4f}"
