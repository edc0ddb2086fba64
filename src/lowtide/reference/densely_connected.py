"""A chain of layers, each fed with everything before it, in ordinary autograd: x <- cat([f_i(x), x])."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def densely_connected(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]], *, new_first: bool = True) -> Tensor:
    """x (N, c0, *S) -> (N, c0 + sum of k_i, *S), by x <- cat([f_i(x), x]), or cat([x, f_i(x)]) unless `new_first`."""
    for layer in layers:
        new = layer(x)
        x = torch.cat([new, x] if new_first else [x, new], 1)
    return x
