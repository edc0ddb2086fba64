"""Errors that a user's input raises: one line that says what was expected, what came, where, and what to do.

Every one derives from `LowtideError`, which the command line prints without a traceback (exit code 2). A wrong result
inside lowtide is an `AssertionError`, never one of these.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base of every error that a user's input can cause."""


class ArgumentError(LowtideError, ValueError):
    """An argument, a flag or a shape is not one that the function accepts."""


class UnsupportedError(LowtideError, NotImplementedError):
    """A request that is well-formed but that the lean path does not offer (another norm, double backward)."""


class DataError(LowtideError, ValueError):
    """A data file or folder is missing, truncated or not of the stated format."""


class CheckpointError(LowtideError, ValueError):
    """A checkpoint or state dict is missing, damaged or of another network."""


class ConversionError(LowtideError, ValueError):
    """A model, or a part of it, cannot be converted to lean blocks."""


class MissingDependencyError(LowtideError, ImportError):
    """An optional package is needed; the message holds the install command."""


class NonFiniteError(LowtideError, ArithmeticError):
    """The loss or a gradient is NaN or infinite; the message names the step, the batch and the saved state."""


class RankError(LowtideError, RuntimeError):
    """The processes of a run do not agree, or one of them was lost; the message names the rank that saw it."""


class ParityError(LowtideError, AssertionError):
    """`ParityReport.raise_if_failed`: the candidate is not the same network as the reference."""


def describe(*, expected: str, got: object, where: str, fix: str = "") -> str:
    """The one-line message of a `LowtideError`.

    >>> describe(expected="a level in none, layer", got="'leyer'", where="DenseNet(recompute=)", fix="use 'layer'")
    "DenseNet(recompute=): expected a level in none, layer, got 'leyer'; use 'layer'"
    """
    tail = f"; {fix}" if fix else ""
    return f"{where}: expected {expected}, got {got}{tail}"
