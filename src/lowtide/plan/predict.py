"""Steps simulated at levels and batches of one model, each once, and what they need in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.levels import Level
from lowtide.measure.call import tensors_in
from lowtide.plan.live import Recording
from lowtide.plan.optimizers import MakeOptimizer
from lowtide.plan.profile import Share, peak_of, shares_of, total_work
from lowtide.plan.result import Memory
from lowtide.plan.simulate import Simulation
from lowtide.plan.speed import seconds

Levels = dict[str, Level]


@dataclass(frozen=True)
class Step:
    """A simulated step: what it needs at its highest moment, and its predicted seconds (of an imagined machine)."""

    memory: Memory
    kept: int
    seconds: float
    shares: dict[str, Share]
    order: list[str]
    operators: int  # that the simulation saw: what it cost

    @property
    def peak(self) -> int:
        return self.memory.total


class Predictor:
    """Steps of one simulation with one optimiser."""

    def __init__(self, simulation: Simulation, make: MakeOptimizer | None, autocast: torch.dtype | None) -> None:
        self._simulation, self._autocast = simulation, autocast
        model = simulation.model
        self.device_type = simulation.device.type
        self.parameters = _bytes(list(model.parameters()))
        self.buffers = _bytes(simulation.state) - self.parameters
        self.state, self._transient = simulation.optimizer(make)

    @property
    def fixed(self) -> int:
        """Bytes that are there whatever the batch."""
        return self.parameters + self.buffers + self.state

    def step(self, levels: Levels, batch: int | None = None, autocast: torch.dtype | None = None) -> Step:
        """Raises: see `Simulation.run`."""
        recording = self._simulation.run(levels, batch, autocast or self._autocast)
        return Step(
            self._memory(recording, _bytes(tensors_in(self._simulation.inputs(batch)))),
            sum(stored.nbytes for stored in recording.kept if stored.died is not None) + recording.random_states,
            seconds(total_work(recording), self.device_type),
            shares_of(recording),
            recording.order,
            len(recording.live),
        )

    def _memory(self, recording: Recording, inputs: int) -> Memory:
        peak = peak_of(recording)
        gradients = sum(stored.nbytes for stored in recording.gradients)
        if gradients + self._transient > peak.nbytes:
            # the optimiser's step is the highest moment
            return Memory(self.parameters, self.buffers, inputs, self.state, gradients, 0, self._transient)
        return Memory(self.parameters, self.buffers, inputs, self.state, peak.gradients, peak.kept, peak.transient)

    def seconds(self, share: Share) -> float:
        return seconds(share.work, self.device_type)


def _bytes(tensors: list[Any]) -> int:
    """Bytes of the storages under some tensors, each once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(found.values())
