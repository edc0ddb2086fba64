"""The fastest mixture of levels whose peak stays within a budget, from what each place adds at each level.

A dynamic program over the places in the order of the forward. Of the mixtures of the places so far only those count
that no other one beats in kept bytes and in time: what follows sees nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.levels import Level
from lowtide.plan.parts import Part
from lowtide.plan.profile import Share, part_of

MOST_MIXTURES = 512


@dataclass(frozen=True)
class _Mixture:
    kept: int
    seconds: float
    levels: Mapping[str, Level]


def choose(
    parts: Sequence[Part],
    order: Sequence[str],
    shares: Mapping[Level, Mapping[str, Share]],
    seconds: Callable[[Share], float],
    budget: int,
) -> dict[str, Level] | None:
    """Part name -> level, or None if no mixture is predicted to fit into `budget` bytes (over what is there anyway).

    shares: what each place adds, from a step with every part at that level.
    """
    options = {part.name: _options(part, shares) for part in parts}
    first: Level = next(iter(shares))
    mixtures = [_Mixture(0, 0.0, {})]
    for place, following in zip(order, [*map(part_of, order[1:]), None], strict=True):
        part = part_of(place)
        grown: list[_Mixture] = []
        for mixture in mixtures:
            candidates: dict[Level, Mapping[str, Level]]
            if part not in options:
                candidates = {first: mixture.levels}
            elif part in mixture.levels:
                candidates = {mixture.levels[part]: mixture.levels}
            else:
                candidates = {level: {**mixture.levels, part: level} for level in options[part]}
            for level, levels in candidates.items():
                share = shares[level].get(place, Share())
                if mixture.kept + share.rest <= budget:
                    grown.append(_Mixture(mixture.kept + share.kept, mixture.seconds + seconds(share), levels))
        # places with the part's level may still come, and see that level too
        mixtures = grown if following == part else _best(grown)
        if not mixtures:
            return None
    fastest = min(mixtures, key=lambda mixture: mixture.seconds)
    return {name: fastest.levels.get(name, own[-1]) for name, own in options.items()}


def _options(part: Part, shares: Mapping[Level, object]) -> list[Level]:
    """A container is plain only where all is plain, which is no mixture."""
    return [level for level in part.levels if level in shares and not (part.follows and level == "none")]


def _best(mixtures: list[_Mixture]) -> list[_Mixture]:
    """Those that no other beats in both kept bytes and seconds, thinned evenly if they are many."""
    kept: list[_Mixture] = []
    for mixture in sorted(mixtures, key=lambda m: (m.kept, m.seconds)):
        if not kept or mixture.seconds < kept[-1].seconds:
            kept.append(mixture)
    step = -(-len(kept) // MOST_MIXTURES)
    return kept if step <= 1 else [*kept[:-1:step], kept[-1]]
