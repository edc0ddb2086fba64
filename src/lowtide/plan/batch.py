"""The largest batch whose step fits a budget.

Peaks grow nearly in a straight line with the batch: a line through the last simulated ones says where to look next,
between a batch that fits and one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST = 2**16


def largest_batch(
    peak: Callable[[int], int | None], known: Mapping[int, int], floor: int, budget: int, afford: Callable[[], bool]
) -> int:
    """The largest batch with a peak of at most `budget` bytes, 0 if there is none, at most `MOST`.

    Args:
        peak: simulates a batch; None if it cannot run (a norm wants more than one value).
        known: batch -> peak, of those simulated already, at least one.
        floor: bytes that a batch of any size needs.
        afford: whether another simulation is worth its time; when it is not, the largest batch seen to fit counts.
    """
    points = dict(known)
    low = max((batch for batch, nbytes in points.items() if nbytes <= budget), default=0)
    high = min((batch for batch, nbytes in points.items() if nbytes > budget), default=MOST + 1)
    if floor >= budget:
        return 0
    while high - low > 1 and afford():
        batch = min(max(_guess(points, floor, budget), low + 1), high - 1)
        found = peak(batch)
        if found is None or found <= budget:  # what cannot run is too small, not too large
            low = batch
        else:
            high = batch
        if found is not None:
            points[batch] = found
    return max((size for size, nbytes in points.items() if nbytes <= budget), default=0)


def _guess(points: Mapping[int, int], floor: int, budget: int) -> int:
    """Where the line through the two points nearest to the budget meets it."""
    (one, at_one), *others = sorted(points.items(), key=lambda point: abs(point[1] - budget))[:2]
    other, at_other = others[0] if others else (0, floor)
    slope = (at_one - at_other) / (one - other)
    if slope <= 0:
        return MOST
    return int(one + (budget - at_one) / slope)
