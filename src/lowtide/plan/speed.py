"""A simple model of time, to put levels in order and to say about how far apart they are.

    seconds = flops / rate + fused / native rate + moved / bandwidth + near / near bandwidth
              + fresh / clearing rate + calls * overhead

It is printed as relative time alone: only the ratios of the constants matter. The CPU's were set by hand to what two
cores took for a few networks (docs/plan.md says how well they do); a GPU's are orders of magnitude, never compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.live import Work


@dataclass(frozen=True)
class Machine:
    flops_per_second: float
    fused_per_second: float
    bytes_per_second: float
    near_bytes_per_second: float
    fresh_bytes_per_second: float
    seconds_per_call: float


MACHINES = {
    "cpu": Machine(2.7e11, 5e11, 3.2e10, 8e10, 8e9, 3e-6),
    "cuda": Machine(5e13, 5e13, 2e12, 4e12, 2e12, 8e-6),
}


def seconds(work: Work, device_type: str) -> float:
    machine = MACHINES.get(device_type, MACHINES["cuda"])
    return (
        work.flops / machine.flops_per_second
        + work.fused / machine.fused_per_second
        + work.moved / machine.bytes_per_second
        + work.near / machine.near_bytes_per_second
        + work.fresh / machine.fresh_bytes_per_second
        + work.calls * machine.seconds_per_call
    )
