"""The pass in float32, bfloat16, float16 or autocast: each step starts from the oracle's weights and buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import ArgumentError
from lowtide.verify.draws import Draw, DrawRecorder, DrawReplayer, NotReplayableError
from lowtide.verify.exact import Checkpoint, Exact, run_reference
from lowtide.verify.findings import Findings
from lowtide.verify.kinks import KinkRecorder
from lowtide.verify.options import Options, Precision
from lowtide.verify.rule import Rule, compare
from lowtide.verify.run import Observer, Phase, Record, RunError, Setting, run
from lowtide.verify.subject import State, Subject


@dataclass
class Trio:
    """Ours, plain in the same dtype, and the oracle in float64; all three start each phase from one rounded state."""

    oracle: Subject
    plain: Subject
    ours: Subject
    setting: Setting
    oracle_setting: Setting

    @classmethod
    def make(cls, oracle: Subject, plain: Subject, ours: Subject, precision: Precision, options: Options) -> Trio:
        """Cast `plain` and `ours`; the oracle sees inputs that the low precision can hold."""
        for subject in (plain, ours):
            subject.to(precision.dtype, options.device)
        setting = options.setting(precision.dtype, precision.autocast)
        rounded = setting.inputs.map(lambda t: t.to(torch.float64) if t.is_floating_point() else t)
        rounded = rounded.map(lambda t: t.to(torch.complex128) if t.is_complex() else t)
        return cls(oracle, plain, ours, setting, options.setting(torch.float64, inputs=rounded))

    def load(self, state: State) -> bool:
        """Round `state` and give it to all three; True where rounding changed nothing."""
        self.plain.load(state)
        rounded = self.plain.state()
        for subject in (self.ours, self.oracle):
            subject.load(rounded)
        return all(torch.equal(value, rounded[name].to(value.dtype)) for name, value in state.items())

    def run_plain(self, phase: Phase, observer: Observer | None = None) -> tuple[Record, list[Draw]]:
        """Plain, and the random tensors that it drew."""
        recorder = DrawRecorder()
        return run_reference(self.plain, phase, self.setting, during=recorder, observer=observer), recorder.draws

    def run_oracle(
        self, phase: Phase, draws: list[Draw], kinks: KinkRecorder | None, observer: Observer | None = None
    ) -> Record:
        """The oracle with plain's random tensors in place of its own."""
        replayer = DrawReplayer(draws) if draws else None
        modes = {"during": replayer, "during_forward": kinks, "observer": observer}
        return run_reference(self.oracle, phase, self.oracle_setting, **modes)


def phases_for(precision: Precision, exact: Exact) -> list[Checkpoint]:
    """By default the first step and the eval output; every forward and step in a dtype that was asked for."""
    steps = [c for c in exact.checkpoints if c.phase.update]
    no_grad = [c for c in exact.checkpoints if not c.phase.grad and c.phase.train]
    evals = [c for c in exact.checkpoints if not c.phase.grad and not c.phase.train]
    return (no_grad + steps if precision.asked else steps[:1]) + evals


def run_low_precision(trio: Trio, precision: Precision, exact: Exact, findings: Findings) -> tuple[Phase, State] | None:
    """Compare each phase by the low-precision rule. Returns the first failing phase and the weights before it.

    Raises:
        ArgumentError: the reference raised, in a dtype that the caller asked for.
    """
    label, notes = trio.setting.label, findings.report.notes
    same_inputs = _equal_inputs(trio, exact)
    failed_at = None
    for checkpoint in phases_for(precision, exact):
        phase = checkpoint.phase
        unrounded = trio.load(checkpoint.state) and same_inputs
        try:
            plain, draws = trio.run_plain(phase)
        except ArgumentError as error:
            if precision.asked:
                raise
            notes.append(f"{label} not run: {error}")
            return failed_at
        if unrounded and not plain.drew:
            oracle, kinks = checkpoint.record, checkpoint.kinks
        else:
            kinks = KinkRecorder() if phase.backward else None
            try:
                oracle = trio.run_oracle(phase, draws, kinks)
            except NotReplayableError as error:
                notes.append(f"{label}, {phase.name}: not decidable in this dtype, not judged: {error}")
                continue
        decidable = True
        if kinks is not None:
            margin = kinks.margin(label, phase.name, precision.eps)
            findings.report.margins.append(margin)
            decidable = margin.decidable
        try:
            ours = run(trio.ours, phase, trio.setting)
        except RunError as error:
            findings.candidate_raised(error, label, trio.ours)
            return failed_at
        rule = Rule(label, precision.eps, gradients=decidable)
        rows = compare(phase.name, rule, oracle, ours, plain, eval_mode=not phase.train)
        findings.add(rows)
        if failed_at is None and not all(row.ok for row in rows):
            failed_at = (phase, checkpoint.state)
    return failed_at


def _equal_inputs(trio: Trio, exact: Exact) -> bool:
    given, rounded = exact.inputs.tensors(), trio.oracle_setting.inputs.tensors()
    return all(torch.equal(value, rounded[name]) for name, value in given.items())
