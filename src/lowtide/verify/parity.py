"""The order of a verification: float64, lower precision, hooks, whether it could have failed, and where it did."""

from __future__ import annotations

import torch

from lowtide.verify.draws import caller_untouched
from lowtide.verify.empty import find_empty
from lowtide.verify.exact import RULE, Exact, run_exact, run_reference
from lowtide.verify.findings import Findings
from lowtide.verify.hooks import check_hooks
from lowtide.verify.kinks import KinkRecorder
from lowtide.verify.localise import Scene, call_order, first_departing, owner
from lowtide.verify.low_precision import Trio, run_low_precision
from lowtide.verify.options import Options, Precision
from lowtide.verify.report import ParityReport
from lowtide.verify.rule import Rule
from lowtide.verify.run import Observer, Phase, Record, run
from lowtide.verify.subject import State, Subject, freeze, give_same_weights


class Verification:
    """One verification of `candidate` against `reference`, both left as they are."""

    def __init__(self, reference: object, candidate: object, options: Options) -> None:
        self._targets = (reference, candidate)
        self._options = options
        self.report = ParityReport(_label(reference), _label(candidate))
        self._findings = Findings(self.report)

    def run(self) -> ParityReport:
        """Run everything; see `lowtide.verify`."""
        options, report = self._options, self.report
        with caller_untouched(options.device):
            reference, candidate = self._subjects()
            exact = run_exact(reference, candidate, options, self._findings)
            if not report.ok:
                self._localise(self._exact_scene(reference, exact))
                return report
            for precision in options.precisions:
                plain, ours = self._subjects()
                trio = Trio.make(reference, plain, ours, precision, options)
                failed_at = run_low_precision(trio, precision, exact, self._findings)
                if failed_at is not None:
                    self._localise(_low_scene(trio, precision, *failed_at))
                    return report
            self._hooks(reference, candidate, exact)
            if report.ok:
                find_empty(self._findings, exact.inputs)
        return report

    def _subjects(self) -> tuple[Subject, Subject]:
        """Fresh copies with the reference's weights, in float64."""
        options = self._options
        reference = Subject(self._targets[0], "reference")
        candidate = Subject(self._targets[1], "candidate", reference, options.key_map)
        for subject in (reference, candidate):
            subject.to(torch.float64, options.device)
            freeze(subject, options.frozen)
        give_same_weights(reference, candidate)
        return reference, candidate

    def _hooks(self, reference: Subject, candidate: Subject, exact: Exact) -> None:
        last = exact.checkpoints[-1]
        if "hooks" in self._options.without or last.phase.train:
            return
        phase = Phase("eval under hooks", last.phase.number, train=False, backward=True, input_grad=True, few=True)
        check_hooks(reference, candidate, last.state, phase, self._options.setting(torch.float64), self._findings)

    def _exact_scene(self, reference: Subject, exact: Exact) -> Scene | None:
        if exact.failed_at is None:
            return None
        phase, state = exact.failed_at
        setting = self._options.setting(torch.float64)
        ours = self._subjects()[1]

        def run_oracle(watch: Observer) -> Record:
            reference.load(state)
            return run_reference(reference, phase, setting, observer=watch)

        def run_ours(watch: Observer) -> Record:
            ours.load(state)
            return run(ours, phase, setting, observer=watch)

        return Scene(phase, RULE, reference, ours, None, run_oracle, run_ours, None)

    def _localise(self, scene: Scene | None) -> None:
        """Name the first module, and list failing buffers in execution order."""
        report = self.report
        if scene is None or report.first_module is not None:
            return
        order = call_order(scene)
        position = {name: i for i, name in enumerate(order)}
        buffers = [f for f in report.failures if f.kind == "buffer"]
        in_order = iter(sorted(buffers, key=lambda f: position.get(owner(f.name), len(order))))
        report.failures[:] = [next(in_order) if f.kind == "buffer" else f for f in report.failures]
        report.first_module = first_departing(scene, report.failures, order)


def _low_scene(trio: Trio, precision: Precision, phase: Phase, state: State) -> Scene:
    """All three sides again, from the rounded state, with plain's random tensors replayed in the oracle."""
    trio.load(state)
    start = trio.plain.state()
    draws = trio.run_plain(phase)[1]
    kinks = KinkRecorder()
    trio.oracle.load(start)
    trio.run_oracle(phase, draws, kinks)
    decidable = kinks.margin("", "", precision.eps).decidable

    def run_oracle(watch: Observer) -> Record:
        trio.oracle.load(start)
        return trio.run_oracle(phase, draws, KinkRecorder(), watch)

    def run_ours(watch: Observer) -> Record:
        trio.ours.load(start)
        return run(trio.ours, phase, trio.setting, observer=watch)

    def run_plain(watch: Observer) -> Record:
        trio.plain.load(start)
        return trio.run_plain(phase, watch)[0]

    rule = Rule(trio.setting.label, precision.eps, gradients=decidable)
    return Scene(phase, rule, trio.oracle, trio.ours, trio.plain, run_oracle, run_ours, run_plain)


def _label(target: object) -> str:
    if isinstance(target, torch.nn.Module):
        return type(target).__name__
    return getattr(target, "__qualname__", type(target).__name__)
