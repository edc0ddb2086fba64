"""The first module whose output or gradient departs.

The comparison itself runs without hooks, since a hook may push a lean candidate onto its plain path. Only when
something failed is the failing phase run again with hooks, from the top of the network down: the children of the
network, then the children of the one that departs, and so on. Where the hooks make the fault go away, or the candidate
does not call the children, the module above them is named.

A module departs in the forward when its inputs agree and its output does not; in the backward when the gradients of its
outputs agree and those of its inputs or of its own parameters do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lowtide.errors import ArgumentError
from lowtide.verify.report import Failure, Kind, Row
from lowtide.verify.rule import Rule, compare, judge, largest_gradient
from lowtide.verify.run import Observer, Phase, Record, RunError
from lowtide.verify.subject import Subject
from lowtide.verify.watch import CallOrder, CallView, Watch

FORWARD_KINDS: tuple[Kind, ...] = ("output", "eval_output", "requires_grad", "input_changed")
RNG_KINDS: tuple[Kind, ...] = ("rng",)
BACKWARD_KINDS: tuple[Kind, ...] = ("input_grad", "param_grad", "missing_grad")
PARAMETER = "parameter "  # how a changed parameter is named among the changed inputs
RunWatched = Callable[[Observer], Record]


@dataclass
class Scene:
    """The failing phase, ready to run again: each function restores its subject's state, runs and records."""

    phase: Phase
    rule: Rule
    oracle: Subject
    ours: Subject
    plain: Subject | None
    run_oracle: RunWatched
    run_ours: RunWatched
    run_plain: RunWatched | None


@dataclass
class _Look:
    """One run of all sides with hooks on the same modules."""

    oracle: tuple[Record, Watch]
    ours: tuple[Record, Watch]
    plain: tuple[Record, Watch] | None


def first_departing(scene: Scene, failures: list[Failure], called: list[str]) -> str | None:
    """The module to name for `failures`, those of the scene's phase; None where it cannot be told.

    `called` is `call_order(scene)`.
    """
    here = [f for f in failures if f.phase == scene.phase.name]
    for group in (FORWARD_KINDS, BACKWARD_KINDS, RNG_KINDS):
        members = [f for f in here if f.kind in group]
        if members:
            if members[0].name.startswith(PARAMETER):
                return owner(members[0].name.removeprefix(PARAMETER))
            found = _descend(scene, group, called)
            return found or None if group == RNG_KINDS else found  # drawn in the backward, or outside every module
    buffers = [f for f in failures if f.kind == "buffer"]
    return owner(buffers[0].name) if buffers else None


def owner(name: str) -> str:
    """The module that holds a parameter or a buffer."""
    return name.rpartition(".")[0]


def _descend(scene: Scene, group: tuple[Kind, ...], called: list[str]) -> str:
    found = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lean block may say that it runs plain under hooks: nobody asked here
        while True:
            names = _called_below(scene, found, called)
            look = _look(scene, names) if names else None
            if look is None or not _still_fails(scene, look, group):
                return found
            step = _backward_step(scene, look) if group == BACKWARD_KINDS else _forward_step(scene, look)
            if step is None:
                return found
            found = step


def call_order(scene: Scene) -> list[str]:
    """The reference's modules in the order in which their first calls finish; empty where it does not bear hooks."""
    order = CallOrder(scene.oracle.submodules())
    try:
        scene.run_oracle(order)
    except ArgumentError:
        return []
    finally:
        order.backward_done()
    return list(order.names)


def _called_below(scene: Scene, parent: str, called: list[str]) -> list[str]:
    """The nearest descendants of `parent` that both have and the reference calls; others are passed through."""
    shared = scene.ours.submodules().keys() & called
    prefix = f"{parent}." if parent else ""
    names = []
    for name in scene.oracle.submodules():
        if name and name.startswith(prefix) and "." not in name[len(prefix) :] and name != parent:
            names += [name] if name in shared else _called_below(scene, name, called)
    return names


def _look(scene: Scene, names: list[str]) -> _Look | None:
    """None where a side does not bear the hooks."""

    def watched(subject: Subject, runner: RunWatched) -> tuple[Record, Watch]:
        modules = subject.submodules()
        watch = Watch({name: modules[name] for name in names})
        try:
            return runner(watch), watch
        finally:
            watch.backward_done()

    try:
        plain = (
            watched(scene.plain, scene.run_plain) if scene.plain is not None and scene.run_plain is not None else None
        )
        return _Look(watched(scene.oracle, scene.run_oracle), watched(scene.ours, scene.run_ours), plain)
    except (RunError, ArgumentError):
        return None


def _still_fails(scene: Scene, look: _Look, group: tuple[Kind, ...]) -> bool:
    plain = look.plain[0] if look.plain else None
    rows = compare(scene.phase.name, scene.rule, look.oracle[0], look.ours[0], plain, eval_mode=not scene.phase.train)
    return any(row.kind in group and not row.ok for row in rows)


@dataclass
class _Calls:
    """The same call on all sides."""

    oracle: CallView
    ours: CallView
    plain: CallView | None


def _paired(look: _Look) -> list[_Calls]:
    """Calls that both made, the k-th of a module with the k-th, in the reference's order of finishing."""
    seen: dict[str, int] = {}
    pairs = []
    for call in look.oracle[1].in_order():
        k = seen[call.module] = seen.get(call.module, -1) + 1
        ours = look.ours[1].calls[call.module]
        plain = look.plain[1].calls[call.module] if look.plain else None
        if k < len(ours) and ours[k].finished >= 0 and (plain is None or k < len(plain)):
            pairs.append(_Calls(call, ours[k], None if plain is None else plain[k]))
    return pairs


def _forward_step(scene: Scene, look: _Look) -> str | None:
    for calls in _paired(look):
        ours, twin = calls.ours, calls.plain or calls.oracle
        departs = (
            (ours.inputs_changed and not twin.inputs_changed)
            or ours.output_requires_grad != twin.output_requires_grad
            or ours.generator_after != twin.generator_after
            or not _agree(scene, calls, "outputs")
        )
        same_start = ours.generator_before == twin.generator_before and _agree(scene, calls, "inputs")
        if departs and same_start:
            return calls.oracle.module
    return None


def _backward_step(scene: Scene, look: _Look) -> str | None:
    largest = largest_gradient(look.oracle[0])
    plain = look.plain[0] if look.plain else None
    rows = compare(scene.phase.name, scene.rule, look.oracle[0], look.ours[0], plain, eval_mode=not scene.phase.train)
    wrong_parameters = [row.name for row in rows if row.kind in ("param_grad", "missing_grad") and not row.ok]
    missing = [row.name for row in rows if row.kind == "missing_grad"]
    for calls in _paired(look):  # a graph that ends here: nothing comes back, neither to its parameters
        cut = calls.oracle.output_requires_grad != calls.ours.output_requires_grad
        if cut and any(parameter.startswith(f"{calls.oracle.module}.") for parameter in missing):
            return calls.oracle.module
    for calls in sorted(_paired(look), key=lambda c: -c.oracle.started):
        name = calls.oracle.module
        own = any(parameter.startswith(f"{name}.") for parameter in wrong_parameters)
        agree = _agree(scene, calls, "output_grads", largest)
        if agree and (own or not _agree(scene, calls, "input_grads", largest)):
            return name
    return None


def _agree(scene: Scene, calls: _Calls, what: str, noise: float = 0.0) -> bool:
    expected, got = getattr(calls.oracle, what), getattr(calls.ours, what)
    if expected.keys() != got.keys():
        return False
    twins: dict[str, Tensor] = getattr(calls.plain, what) if calls.plain is not None else {}
    rows: list[Row] = []
    for path, value in expected.items():
        if not value.is_floating_point() and not value.is_complex() and scene.rule.eps is not None:
            continue
        rows.append(judge("output", path, "", scene.rule, value, got[path], twins.get(path), noise=noise))
    return all(row.ok for row in rows)
