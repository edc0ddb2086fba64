"""The float64 pass: both modules train freely from the same weights, and are compared after every phase."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

import torch

from lowtide.errors import ArgumentError, describe
from lowtide.verify.findings import Findings
from lowtide.verify.kinks import KinkRecorder
from lowtide.verify.localise import PARAMETER
from lowtide.verify.options import Options
from lowtide.verify.report import Row
from lowtide.verify.rule import Rule, compare, judge
from lowtide.verify.run import Phase, Record, RunError, Setting, run
from lowtide.verify.subject import State, Subject
from lowtide.verify.trees import Inputs

RULE = Rule("float64")
_FIRST_MOVE = 0.01  # the default optimiser's first step moves the weights by this share of their norm


@dataclass
class Checkpoint:
    """What the low-precision passes start from: the state before a phase, and what the oracle showed in it."""

    phase: Phase
    state: State
    record: Record
    kinks: KinkRecorder | None


@dataclass
class Exact:
    """The result of the pass."""

    inputs: Inputs
    checkpoints: list[Checkpoint] = field(default_factory=list)
    failed_at: tuple[Phase, State] | None = None  # the first failing phase, and the weights before it


def run_exact(reference: Subject, candidate: Subject, options: Options, findings: Findings) -> Exact:
    """Run every phase on both.

    After the first failure the candidate is given the reference's state again after each phase, so that one fault does
    not show up as many; only the eval output is judged with the buffers that the candidate itself left.

    Raises:
        ArgumentError: the reference raised.
    """
    setting = options.setting(torch.float64)
    trained = [p for p in reference.parameters().values() if p.requires_grad]
    optimizers = _Optimizers(reference, candidate, options)
    result = Exact(setting.inputs)
    own_buffers: State = {}
    for phase in options.phases(always_input_grad=not trained):
        state = reference.state()
        if own_buffers and not phase.train:
            candidate.load(own_buffers)  # the eval output that the candidate's own statistics lead to
        # the low-precision passes start from the first step, from all of them in a dtype that was asked for
        measure_kinks = phase.update and any(p.asked or not any_step(result) for p in options.precisions)
        kinks = KinkRecorder() if measure_kinks else None
        try:
            oracle, ours = _run_both(reference, candidate, phase, setting, kinks)
        except RunError as error:
            findings.candidate_raised(error, RULE.label, candidate)
            result.failed_at = result.failed_at or (phase, state)
            return result
        rows = compare(phase.name, RULE, oracle, ours, None, eval_mode=not phase.train)
        if own_buffers and not phase.train:
            rows = [row for row in rows if row.kind != "buffer"]
        if not any_step(result):
            rows += _changed_parameters(phase, reference, candidate)
        findings.add(rows)
        if not all(row.ok for row in rows):
            result.failed_at = result.failed_at or (phase, state)
            if any(row.kind == "buffer" and not row.ok for row in rows):
                own_buffers = {name: buffer.clone() for name, buffer in candidate.buffers().items()}
        result.checkpoints.append(Checkpoint(phase, state, oracle, kinks))
        if phase.update:
            optimizers.step(oracle)
        if result.failed_at is not None:
            candidate.load(reference.state())
    return result


def _run_both(
    reference: Subject, candidate: Subject, phase: Phase, setting: Setting, kinks: KinkRecorder | None
) -> tuple[Record, Record]:
    *few, full = setting.to_try(phase)
    for tried in few:
        with contextlib.suppress(RunError):  # not with so few samples
            return run(reference, phase, tried), run(candidate, phase, tried)
    return run_reference(reference, phase, full, during_forward=kinks), run(candidate, phase, full)


def any_step(result: Exact) -> bool:
    """Whether a training step has been run."""
    return any(checkpoint.phase.update for checkpoint in result.checkpoints)


def run_reference(reference: Subject, phase: Phase, setting: Setting, **observers) -> Record:
    """`run`, with what the reference raises turned into the caller's `ArgumentError`."""
    try:
        return run(reference, phase, setting, **observers)
    except RunError as error:
        got = f"{type(error.cause).__name__}: {error.cause}"
        where = f"verify, the reference in {phase.name} ({setting.label})"
        fix = "it must run by itself with these inputs before anything can be compared to it"
        raise ArgumentError(describe(expected="a reference that runs", got=got, where=where, fix=fix)) from error.cause


def _changed_parameters(phase: Phase, reference: Subject, candidate: Subject) -> list[Row]:
    """Until the first optimiser step parameters are equal bit by bit, unless a module wrote to its own."""
    own = candidate.parameters()
    return [
        judge("input_changed", f"{PARAMETER}{name}", phase.name, RULE, parameter.detach(), own[name].detach(), None)
        for name, parameter in reference.parameters().items()
        if not torch.equal(parameter, own[name])
    ]


class _Optimizers:
    """The same optimiser for both modules, made at the first step."""

    def __init__(self, reference: Subject, candidate: Subject, options: Options) -> None:
        self._subjects = (reference, candidate)
        self._options = options
        self._made: list[torch.optim.Optimizer] = []

    def step(self, oracle: Record) -> None:
        """Update both. By default SGD with momentum 0.9 and the learning rate that first moves the weights by 1 %."""
        if not self._made:
            make = self._options.optimizer
            rate = self._default_rate(oracle)
            for subject in self._subjects:
                trained = [p for p in subject.module.parameters() if p.requires_grad]
                if trained:
                    self._made.append(make(trained) if make else torch.optim.SGD(trained, lr=rate, momentum=0.9))
        for optimizer in self._made:
            optimizer.step()

    def _default_rate(self, oracle: Record) -> float:
        grads = [(name, g) for name, g in oracle.param_grads.items() if g is not None]
        weights = self._subjects[0].parameters()
        weight_norm = math.sqrt(sum(float(weights[name].detach().norm()) ** 2 for name, _ in grads))
        grad_norm = math.sqrt(sum(float(g.norm()) ** 2 for _, g in grads))
        return _FIRST_MOVE * (weight_norm or 1.0) / grad_norm if grad_norm > 0 and math.isfinite(grad_norm) else 0.0
