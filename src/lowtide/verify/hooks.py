"""What a user's hooks see: forward hooks' outputs and their gradients, on the network and the modules near its top."""

from __future__ import annotations

import math
import warnings

from torch import Tensor, nn

from lowtide.verify.exact import RULE
from lowtide.verify.findings import Findings
from lowtide.verify.report import Row
from lowtide.verify.rule import judge, largest_gradient
from lowtide.verify.run import Phase, Record, RunError, Setting, run
from lowtide.verify.subject import State, Subject
from lowtide.verify.trees import is_inexact, leaves

_DEPTH = 1  # the network and its children: deeper hooks may ask a lean block to run the plain way


class HookView:
    """Hooks on `modules`. A hook keeps the tensor that it is given, as user code does, so that what a later in-place
    operation does to it is seen too."""

    def __init__(self, modules: dict[str, nn.Module], backward_hooks: bool) -> None:
        self.outputs: dict[str, list[dict[str, Tensor]]] = {name: [] for name in modules}
        self.grads: dict[str, list[dict[str, Tensor]]] = {name: [] for name in modules}
        self.backward_grads: dict[str, list[dict[str, Tensor]]] = {name: [] for name in modules}
        self._forward = True
        self._handles = [m.register_forward_hook(self._forward_hook(name)) for name, m in modules.items()]
        if backward_hooks:
            self._handles += [m.register_full_backward_hook(self._backward_hook(name)) for name, m in modules.items()]

    def _forward_hook(self, name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if not self._forward:
                return  # a recompute
            seen = {path: leaf for path, leaf in leaves(output, "").items() if is_inexact(leaf)}
            grads: dict[str, Tensor] = {}
            self.outputs[name].append(seen)  # type: ignore[arg-type]
            self.grads[name].append(grads)
            for path, leaf in seen.items():
                assert isinstance(leaf, Tensor)
                if leaf.requires_grad:
                    leaf.register_hook(lambda grad, path=path: grads.__setitem__(path, grad.detach().clone()))

        return hook

    def _backward_hook(self, name: str):
        def hook(module: nn.Module, grad_input: object, grad_output: object) -> None:
            seen = {p: g.detach().clone() for p, g in leaves(grad_output, "").items() if isinstance(g, Tensor)}
            self.backward_grads[name].append(seen)

        return hook

    def forward_done(self) -> None:
        """Read the kept outputs as they are after the whole forward."""
        self._forward = False
        for calls in self.outputs.values():
            calls[:] = [{path: t.detach().clone() for path, t in call.items()} for call in calls]

    def backward_done(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def near_top(subject: Subject) -> list[str]:
    """The network itself and its children, by the reference's names."""
    return [name for name in subject.submodules() if name.count(".") < _DEPTH]


def check_hooks(
    reference: Subject, candidate: Subject, state: State, phase: Phase, setting: Setting, findings: Findings
) -> None:
    """Hook both copies at the same places and compare what the hooks see.

    Where the reference itself does not bear backward hooks (an in-place operation on a module's output), only forward
    and tensor hooks are placed.
    """
    names = [name for name in near_top(reference) if name in candidate.submodules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lean block may say that it runs plain under hooks: nobody asked here
        for backward_hooks in (True, False):
            refusal = None
            for used in setting.to_try(phase):
                try:
                    oracle, expected = _look(reference, names, state, phase, used, backward_hooks)
                    _, got = _look(candidate, names, state, phase, used, backward_hooks)
                except RunError as error:
                    refusal = error
                    continue
                _judge(names, phase, oracle, expected, got, findings)
                return
            assert refusal is not None, "every setting was refused"
            if refusal.role == "candidate":  # without backward hooks it may run, and show where
                findings.candidate_raised(refusal, RULE.label, candidate, kind="hook")
            elif not backward_hooks:
                findings.report.notes.append(f"hooks not checked: {refusal}")


def _look(
    subject: Subject, names: list[str], state: State, phase: Phase, setting: Setting, backward_hooks: bool
) -> tuple[Record, HookView]:
    subject.load(state)
    modules = subject.submodules()
    view = HookView({name: modules[name] for name in names}, backward_hooks)
    try:
        return run(subject, phase, setting, observer=view), view
    finally:
        view.backward_done()


def _judge(
    names: list[str], phase: Phase, oracle: Record, expected: HookView, got: HookView, findings: Findings
) -> None:
    called = [name for name in names if expected.outputs[name]]
    silent = [name or "the network itself" for name in called if not got.outputs[name]]
    if silent:
        findings.report.notes.append(f"hooks see nothing on {', '.join(silent)}: the candidate does not call them")
    largest = largest_gradient(oracle)
    rows = []
    for name in called:
        if got.outputs[name]:
            rows += _compare(name, phase, expected, got, largest)
    findings.add(rows)
    failed = [row for row in rows if not row.ok]
    if failed:
        findings.report.first_module = failed[0].name


def _compare(name: str, phase: Phase, expected: HookView, got: HookView, largest: float) -> list[Row]:
    rows = []
    sides = (
        ("forward hook", expected.outputs[name], got.outputs[name], 0.0),
        ("tensor hook", expected.grads[name], got.grads[name], largest),
        ("backward hook", expected.backward_grads[name], got.backward_grads[name], largest),
    )
    for what, wanted, seen, noise in sides:
        if [call.keys() for call in wanted] != [call.keys() for call in seen]:
            tensors = f"{sum(map(len, wanted))} in {len(wanted)} calls", f"{sum(map(len, seen))} in {len(seen)} calls"
            message = f"{what}: expected tensors {tensors[0]}, got {tensors[1]}"
            rows.append(Row("hook", name, phase.name, RULE.label, math.inf, 0.0, message=message))
            continue
        for wanted_call, seen_call in zip(wanted, seen, strict=True):
            for path, value in wanted_call.items():
                row = judge("hook", name, phase.name, RULE, value, seen_call[path], None, noise=noise)
                rows.append(row if row.ok else Row(**{**vars(row), "message": f"{what} sees other values"}))
    return rows
