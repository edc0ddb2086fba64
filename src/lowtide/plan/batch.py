"""The largest batch whose step fits a budget.

Peaks grow nearly in a straight line with the batch: a line through simulated ones says where to look next, between a
batch that fits and one that does not. Where another simulation would take long, the line has the last word.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.errors import LowtideError

MOST = 2**16
SIMULATIONS = 16
OPERATORS = 40_000  # simulated in one search: a second or two

# batch -> (peak in bytes, operators that the simulation took)
Simulate = Callable[[int], tuple[int, int]]


def largest_batch(simulate: Simulate, batch: int, known: tuple[int, int], floor: int, budget: int) -> int:
    """The largest batch with a peak of at most `budget` bytes, 0 if there is none, at most `MOST`.

    Args:
        batch, known: one that was simulated, and its result.
        floor: bytes that a batch of any size needs.
    """
    if floor >= budget:
        return 0
    points, costs = {0: floor, batch: known[0]}, {batch: known[1]}
    low, high = (batch, MOST + 1) if known[0] <= budget else (0, batch)
    fits, spent = low, 0
    while high - low > 1:
        wanted = min(max(_line_meets(points, budget), low + 1), high - 1)
        if len(costs) == 1:
            wanted = min(wanted, 2 * batch)  # far from what is known the line is of no use yet
        elif high > MOST:
            wanted = min(wanted, 4 * max(costs))
        elif len(costs) % 3 == 0:
            wanted = (low + high) // 2  # where the peaks bend, the line alone creeps
        if len(costs) > 1 and (len(costs) > SIMULATIONS or spent + _cost_of(costs, wanted) > OPERATORS):
            return max(fits, min(_line_meets(points, budget), high - 1))
        try:
            points[wanted], costs[wanted] = simulate(wanted)
        except LowtideError:  # batch norm may want more than one value: too small, not too large
            low, costs[wanted] = wanted, 0
            continue
        spent += costs[wanted]
        points.pop(0, None)  # the floor leaves out the gradients
        if points[wanted] <= budget:
            low = fits = wanted
        else:
            high = wanted
    return fits


def _line_meets(points: dict[int, int], budget: int) -> int:
    """Where the line through the points on either side of the budget, or the two nearest to it, meets it."""
    below = [point for point in points.items() if point[1] <= budget]
    above = [point for point in points.items() if point[1] > budget]
    if below and above:
        (one, at_one), (other, at_other) = max(below), min(above)
    else:
        (one, at_one), (other, at_other) = sorted(points.items(), key=lambda point: abs(point[1] - budget))[:2]
    slope = (at_one - at_other) / (one - other)
    return MOST if slope <= 0 else int(one + (budget - at_one) / slope)


def _cost_of(costs: dict[int, int], batch: int) -> float:
    """Operators that a batch would take, by the line through the smallest and the largest one known."""
    first, last = min(costs), max(costs)
    slope = max(0.0, (costs[last] - costs[first]) / (last - first))
    return costs[last] + slope * max(0, batch - last)
