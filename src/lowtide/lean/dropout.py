"""Dropout masks drawn again from a saved random state, with the numbers that ordinary dropout draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import DenseLayer

if TYPE_CHECKING:
    from lowtide.lean.dense_block import Tools


def random_state(device: torch.device) -> Tensor:
    """State of the generator that dropout on `device` draws from."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def draw(layer: DenseLayer, new: Tensor, tools: Tools, state: Tensor, *, replay: bool) -> Tensor:
    """The mask (0 or 1 / (1 - p)) for new (N, k, S). With `replay` from `state`, the generator left as it was.

    The mask is drawn in the dtype and memory order of the map that ordinary dropout would see, since both decide which
    numbers the generator gives to which place.
    """
    n, k, s = new.shape
    shape = (n, k, 1) if layer.drop_channels else (n, k, s)
    ones = torch.ones(shape, dtype=tools.dtype, device=new.device)
    if tools.plain_rows and not layer.drop_channels:
        ones = ones.transpose(1, 2).contiguous().transpose(1, 2)
    if not replay:
        return _mask(ones, layer)
    devices = [] if new.device.type == "cpu" else [new.device]
    with torch.random.fork_rng(devices=devices):
        if new.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, new.device)
        return _mask(ones, layer)


def _mask(ones: Tensor, layer: DenseLayer) -> Tensor:
    if layer.drop_channels:
        return torch.feature_dropout(ones, layer.drop_rate, True)
    return F.dropout(ones, layer.drop_rate, True)
