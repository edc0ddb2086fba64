"""A simple model of time: seconds = operations / rate + bytes / bandwidth + calls * overhead.

It is there to put levels in order and to say about how far they are apart; it is printed as relative time. The
constants are of the order of two CPU cores' or one large GPU's, and only their ratios matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.live import Work


@dataclass(frozen=True)
class Machine:
    flops_per_second: float
    bytes_per_second: float
    near_bytes_per_second: float
    seconds_per_call: float


MACHINES = {"cpu": Machine(2e11, 2e10, 8e10, 2e-6), "cuda": Machine(5e13, 2e12, 4e12, 8e-6)}


def seconds(work: Work, device_type: str) -> float:
    machine = MACHINES.get(device_type, MACHINES["cuda"])
    return (
        work.flops / machine.flops_per_second
        + work.moved / machine.bytes_per_second
        + work.near / machine.near_bytes_per_second
        + work.calls * machine.seconds_per_call
    )
