"""What each place of a step contributes to the peak, so that any mixture of levels can be added up.

For a recording at one level per part, with `kept(p)` the bytes that place p keeps for backward:

    in the forward and backward of place p:   live = sum of kept(q) over the places q before p  +  rest(p)

`rest` is the most that p has beside what earlier places keep: its own maps, transients and the gradients of later
places. With kept, rest and work of every part at every level, a mixture's peak is the largest of the sums above. Places
touch at their borders, so the sum is good to a transient; the levels chosen by it are simulated as a whole once more.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

from lowtide.plan.inside import inside_bytes
from lowtide.plan.live import AFTER, Recording, Work


@dataclass
class Share:
    """One place at one level, in bytes."""

    kept: int = 0
    rest: int = 0
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Peak:
    """Bytes over parameters, buffers, inputs and optimiser state at the highest moment, and what they are."""

    nbytes: int
    gradients: int
    kept: int
    in_backward: bool

    @property
    def transient(self) -> int:
        return self.nbytes - self.gradients - self.kept


def peak_of(recording: Recording) -> Peak:
    """The highest moment, with what operators take inside."""
    most, when = _highest(recording, range(len(recording.live)), 0)

    def alive(stored: object) -> int:
        return sum(s.nbytes for s in stored if s.born <= when and (s.died is None or s.died > when))  # pyright: ignore

    in_backward = when >= recording.forward_end
    gradients = {id(s) for s in recording.gradients}
    kept = [s for s in recording.kept if id(s) not in gradients]
    gradient_bytes = alive(recording.gradients) if in_backward else 0
    states = recording.random_states  # alive for most of the step; counted as if for all of it
    return Peak(most + states, gradient_bytes, alive(kept) + states, in_backward)


def shares_of(recording: Recording) -> dict[str, Share]:
    """Place -> its share."""
    order = {place: i for i, place in enumerate(recording.order)}
    kept = [0] * len(order)
    for stored in recording.kept:
        if stored.died is not None:
            kept[order[stored.place]] += stored.nbytes
    before = {place: sum(kept[:i]) for place, i in order.items()}
    times: dict[str, list[int]] = {place: [] for place in order}
    for time, place in enumerate(recording.places):
        times[place].append(time)
    return {
        place: Share(
            kept[i],
            (_highest(recording, times[place], 0)[0] if times[place] else before[place]) - before[place],
            recording.work[place],
        )
        for place, i in order.items()
    }


def _highest(recording: Recording, times: object, least: int) -> tuple[int, int]:
    """Bytes and time of the highest moment among `times`; operators are tried out only while they could decide it."""
    chosen = set(times)  # pyright: ignore
    live = recording.live
    when = max(chosen, key=live.__getitem__)
    most = max(live[when], least)
    candidates = [(live[time] + call.most_bytes, time, call) for time, call in recording.inside if time in chosen]
    for bound, time, call in sorted(candidates, key=lambda c: -c[0]):
        if bound <= most:
            break
        total = live[time] + inside_bytes(call)
        if total > most:
            most, when = total, time
    return most, when


def part_of(place: str) -> str:
    """The part whose level a place has: its own, or that of the part in front of it."""
    return place.removeprefix(AFTER)


def total_work(recording: Recording) -> Work:
    """The work of all places."""
    total = Work()
    for work in recording.work.values():
        total = Work(*(a + b for a, b in zip(astuple(total), astuple(work), strict=True)))
    return total
