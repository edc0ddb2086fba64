"""The search for the largest batch, on peaks that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowtide.errors import ArgumentError
from lowtide.plan.batch import MOST, largest_batch

FLOOR = 1000
CURVES: dict[str, Callable[[int], int]] = {
    "line": lambda n: FLOOR + 500 + 70 * n,
    "steps": lambda n: FLOOR + 500 + 70 * n + 300 * (n // 8),
    "bend": lambda n: max(FLOOR + 5000, FLOOR + 90 * n),
    "flat": lambda n: FLOOR + 3000,
}


def truth(curve: Callable[[int], int], budget: int) -> int:
    return max((n for n in range(1, 2000) if curve(n) <= budget), default=0)


@pytest.mark.parametrize("budget", [500, 1600, 2600, 6100, 9999, 30_000])
@pytest.mark.parametrize("batch", [1, 4, 33, 300])
@pytest.mark.parametrize("name", ["line", "steps", "bend"])
def test_finds_the_largest(name: str, batch: int, budget: int) -> None:
    curve = CURVES[name]
    found = largest_batch(lambda n: (curve(n), 10), batch, (curve(batch), 10), FLOOR, budget)
    assert found == truth(curve, budget)


def test_stops_at_most() -> None:
    curve = CURVES["flat"]
    assert largest_batch(lambda n: (curve(n), 10), 4, (curve(4), 10), FLOOR, 4001) == MOST


def test_a_batch_of_one_may_not_run() -> None:
    def simulate(n: int) -> tuple[int, int]:
        if n == 1:
            raise ArgumentError("batch norm")
        return FLOOR + 500 * n, 10

    assert largest_batch(simulate, 8, (FLOOR + 4000, 10), FLOOR, FLOOR + 1200) == 2
    assert largest_batch(simulate, 8, (FLOOR + 4000, 10), FLOOR, FLOOR + 700) == 0


def test_costly_simulations_are_few_and_the_line_goes_on() -> None:
    seen: list[int] = []

    def simulate(n: int) -> tuple[int, int]:
        seen.append(n)
        return CURVES["line"](n), 30_000

    assert largest_batch(simulate, 4, (CURVES["line"](4), 30_000), FLOOR, 60_000) == truth(CURVES["line"], 60_000)
    assert seen == [8]
