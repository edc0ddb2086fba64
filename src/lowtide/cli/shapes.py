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
    """Normal float32 tensors of the shapes in `text`, the same for the same seed; "2x128:50": integers below 50.

    Raises:
        ArgumentError: see `parse_shapes`.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for part in text.split(","):
        sizes, colon, below = part.partition(":")
        (shape,) = parse_shapes(sizes, flag)
        if colon and not (below.isdigit() and int(below) > 0):
            expected = "an integer above 0 after the colon, such as 2x128:50"
            raise ArgumentError(describe(expected=expected, got=repr(part), where=flag))
        made = (
            torch.randint(int(below), shape, generator=generator) if colon else torch.randn(shape, generator=generator)
        )
        inputs.append(made)
    return tuple(inputs)
