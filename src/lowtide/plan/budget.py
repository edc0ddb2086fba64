"""Budgets as people write them."""

from __future__ import annotations

from lowtide.errors import ArgumentError, describe
from lowtide.measure.units import parse_bytes


def parse_budget(budget: object, where: str = "plan(budget)") -> int:
    """Bytes from a number of bytes or a text such as "2GiB".

    >>> parse_budget("1.5GiB"), parse_budget(4096)
    (1610612736, 4096)

    Raises:
        ArgumentError: no size, or not positive.
    """
    if isinstance(budget, str):
        nbytes = parse_bytes(budget, where)
    elif isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = budget
    else:
        raise ArgumentError(describe(expected="bytes or a size such as 2GiB", got=repr(budget), where=where))
    if nbytes <= 0:
        raise ArgumentError(describe(expected="a size above 0", got=repr(budget), where=where))
    return nbytes
