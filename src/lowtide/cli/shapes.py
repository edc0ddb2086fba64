"""Shapes on the command line: "8x3x32x32", or several inputs as "8x3x32x32,8x10"."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe


def parse_shapes(text: str, flag: str = "--input") -> list[tuple[int, ...]]:
    """The shapes in `text`.

    >>> parse_shapes("8x3x32x32,8")
    [(8, 3, 32, 32), (8,)]

    Raises:
        ArgumentError: a part that is no positive integer.
    """
    shapes = []
    for part in text.split(","):
        sizes = part.strip().lower().split("x")
        if not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ArgumentError(describe(expected="sizes joined by x, such as 8x3x32x32", got=repr(part), where=flag))
        shapes.append(tuple(int(size) for size in sizes))
    return shapes


def random_inputs(text: str, seed: int = 0, flag: str = "--input") -> tuple[Tensor, ...]:
    """Normal float32 tensors of the shapes in `text`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in parse_shapes(text, flag))
