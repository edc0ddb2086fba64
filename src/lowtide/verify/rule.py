"""When two tensors count as equal: always against the reference in float64, the oracle.

    error = ||ours - oracle||_2      scale = ||oracle||_2

    float64                   error <= 1e-9 * scale
    float32, bfloat16, ...    error <= 2 * error(plain in the same dtype) + 4 * eps * scale

Where the true value is zero, so that only rounding is left of it, a tensor of the same kind gives the scale: for a
gradient (the bias of a convolution before a batch norm) the largest gradient norm in the model, for a running mean the
running deviation beside it. Gradients in low precision are judged only where no kink is within rounding (see `kinks`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.verify.draws import same_state
from lowtide.verify.report import Kind, Row
from lowtide.verify.run import Record, short
from lowtide.verify.trees import is_inexact

EXACT_TOLERANCE = 1e-9
_EPS64 = torch.finfo(torch.float64).eps
_TRUE_ZERO = 1e-11  # a gradient this much smaller than the largest one is rounding noise in float64
_DOUBLE = (torch.float64, torch.complex128)
Tensors = dict[str, Tensor]
_SCALARS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Rule:
    """The rule of one dtype: `eps` None is the float64 rule."""

    label: str
    eps: float | None = None
    gradients: bool = True  # whether gradients are decidable

    def allowed(self, scale: float, noise: float, plain_error: float, dtype: torch.dtype) -> float:
        """The largest error that passes; `noise` is the norm that rounding errors scale with where values cancel."""
        if self.eps is not None:
            return 2 * plain_error + 4 * self.eps * scale
        # a module may return float32 even when it is run in float64
        tolerance = max(EXACT_TOLERANCE, 0.0 if dtype in _DOUBLE else 4 * torch.finfo(dtype).eps)
        return tolerance * scale + 64 * _EPS64 * noise


def compare(
    phase: str, rule: Rule, oracle: Record, ours: Record, plain: Record | None, *, eval_mode: bool
) -> list[Row]:
    """Every comparison of one phase; in low precision `plain` is the reference in the tested dtype."""
    twin = plain or oracle  # flags, dtypes and generators are compared in the same dtype
    rows = _outputs(phase, rule, oracle, ours, plain, "eval_output" if eval_mode else "output")
    for name, expected in twin.requires_grad.items():
        got = ours.requires_grad.get(name)
        if got is not None:
            rows.append(_flag("requires_grad", name, phase, rule, expected, got))
    rows += _changed_inputs(phase, rule, twin, ours)
    for name, state in twin.generators.items():
        same = same_state(state, ours.generators[name])
        message = "" if same else "its state after the step differs: other random numbers follow"
        rows.append(_flag("rng", name, phase, rule, True, same, message))
    if rule.gradients:
        rows += _gradients(phase, rule, oracle, ours, plain)
    return rows + _buffers(phase, rule, oracle, ours, plain)


def _outputs(phase: str, rule: Rule, oracle: Record, ours: Record, plain: Record | None, kind: Kind) -> list[Row]:
    if oracle.outputs.keys() != ours.outputs.keys():
        expected, got = ", ".join(oracle.outputs) or "nothing", ", ".join(ours.outputs) or "nothing"
        message = f"another structure: expected {expected}, got {got}"
        return [Row(kind, "output", phase, rule.label, math.inf, 0.0, message=message)]
    rows = []
    noise = max((_norm(leaf) for leaf in oracle.outputs.values() if is_inexact(leaf)), default=0.0)
    for name, expected in oracle.outputs.items():
        got, twin = ours.outputs[name], (plain or oracle).outputs[name]
        twin = twin if isinstance(twin, Tensor) else None
        if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
            rows.append(_leaf(kind, name, phase, rule, expected, got))
        elif rule.eps is None or is_inexact(expected):  # a rounding error may move a class or an index
            rows.append(judge(kind, name, phase, rule, expected, got, twin, noise=noise))
    return rows


def _leaf(kind: Kind, name: str, phase: str, rule: Rule, expected: object, got: object) -> Row:
    if isinstance(expected, float) and isinstance(got, float):
        pair = torch.tensor(expected, dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
        return judge(kind, name, phase, rule, *pair, pair[0])
    same = type(expected) is type(got) and (not isinstance(expected, _SCALARS) or expected == got)
    return _flag(
        kind, name, phase, rule, expected if isinstance(expected, _SCALARS) else type(expected).__name__, got, same=same
    )


def _changed_inputs(phase: str, rule: Rule, twin: Record, ours: Record) -> list[Row]:
    rows = []
    for name in twin.inputs_changed.keys() | ours.inputs_changed.keys():
        if name not in ours.inputs_changed:
            continue  # the candidate leaves alone what the reference overwrites
        message = "the candidate overwrites it, the reference does not"
        if name in twin.inputs_changed:
            rows.append(
                judge("input_changed", name, phase, rule, twin.inputs_changed[name], ours.inputs_changed[name], None)
            )
        else:
            rows.append(Row("input_changed", name, phase, rule.label, math.inf, 0.0, message=message))
    return rows


def _gradients(phase: str, rule: Rule, oracle: Record, ours: Record, plain: Record | None) -> list[Row]:
    largest = largest_gradient(oracle)
    rows = []
    groups: tuple[tuple[Kind, str], ...] = (("input_grad", "input_grads"), ("param_grad", "param_grads"))
    for kind, group in groups:
        plain_grads = getattr(plain, group) if plain is not None else {}
        for name, expected in getattr(oracle, group).items():
            got = getattr(ours, group).get(name)
            if expected is None and got is None:
                continue
            if expected is None:
                error = _norm(got)
                rows.append(
                    Row(kind, name, phase, rule.label, error, 0.0, message="the reference leaves it without a gradient")
                )
            elif got is None:
                rows.append(
                    Row("missing_grad", name, phase, rule.label, _norm(expected), 0.0, message="no gradient came")
                )
            else:
                rows.append(judge(kind, name, phase, rule, expected, got, plain_grads.get(name), noise=largest))
    return rows


def largest_gradient(record: Record) -> float:
    """The largest gradient norm of the phase: the scale of those that are truly zero."""
    grads = [g for g in [*record.input_grads.values(), *record.param_grads.values()] if g is not None]
    return max((_norm(grad) for grad in grads), default=0.0)


def is_true_zero(scale: float, largest: float) -> bool:
    """Whether a tensor of norm `scale` is nothing but rounding beside one of norm `largest`."""
    return scale <= _TRUE_ZERO * largest


def _buffers(phase: str, rule: Rule, oracle: Record, ours: Record, plain: Record | None) -> list[Row]:
    """Twice where there is a backward: a forward may stay without one, so it must leave the right buffers itself."""
    twin = plain.buffers if plain is not None else None
    rows = _each_buffer(phase, rule, oracle.buffers, ours.buffers, twin)
    if oracle.buffers_before_backward:
        twin = plain.buffers_before_backward if plain is not None else None
        phase = f"{phase}, before its backward"
        early = _each_buffer(phase, rule, oracle.buffers_before_backward, ours.buffers_before_backward, twin)
        rows = early + rows
    return rows


def _each_buffer(phase: str, rule: Rule, oracle: Tensors, ours: Tensors, plain: Tensors | None) -> list[Row]:
    return [
        judge("buffer", name, phase, rule, expected, ours[name], twin, noise=_deviation(name, oracle))
        for name, expected in oracle.items()
        for twin in [plain[name] if plain is not None else None]
        if name in ours  # others are not saved (else the state dicts would differ): the candidate's own business
    ]


def _deviation(name: str, buffers: Tensors) -> float:
    """For a running mean, the norm of the running deviation beside it: what its rounding errors scale with."""
    if not name.endswith("running_mean"):
        return 0.0
    variance = buffers.get(f"{name.removesuffix('running_mean')}running_var")
    if variance is None:
        return 0.0
    return math.sqrt(float(variance.double().nan_to_num(0.0, 0.0, 0.0).clamp_min(0).sum()))


def judge(
    kind: Kind,
    name: str,
    phase: str,
    rule: Rule,
    oracle: Tensor,
    ours: Tensor,
    plain: Tensor | None,
    *,
    noise: float = 0.0,
) -> Row:
    """Compare one tensor by `rule`; `noise` is the norm that gives the scale where `oracle` is truly zero.

    Tensors of integers and booleans must be equal. `plain` also says which dtype is expected of `ours`.
    """
    if oracle.shape != ours.shape:
        message = f"expected shape {tuple(oracle.shape)}, got {tuple(ours.shape)}"
        return Row(kind, name, phase, rule.label, math.inf, 0.0, message=message)
    wanted = (oracle if rule.eps is None or plain is None else plain).dtype
    if ours.dtype != wanted and (rule.eps is None or plain is not None):
        message = f"expected dtype {short(wanted)}, got {short(ours.dtype)}"
        return Row(kind, name, phase, rule.label, math.inf, 0.0, message=message)
    difference, error = _difference(ours, oracle)
    scale = _norm(oracle)
    if is_inexact(oracle):
        plain_error = _difference(plain, oracle)[1] if rule.eps and plain is not None else 0.0
        allowed = rule.allowed(noise if is_true_zero(scale, noise) else scale, noise, plain_error, oracle.dtype)
    else:
        allowed = 0.0
    row = Row(kind, name, phase, rule.label, error, allowed, scale)
    return row if row.ok else _with_worst_element(row, difference, oracle, ours)


def _with_worst_element(row: Row, difference: Tensor, oracle: Tensor, ours: Tensor) -> Row:
    size = difference.abs().nan_to_num(nan=math.inf)
    flat = int(size.argmax()) if size.numel() else 0
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), oracle.shape)) if oracle.dim() else ()
    expected, got = oracle[index].item(), ours[index].item()
    return Row(row.kind, row.name, row.phase, row.dtype, row.error, row.allowed, row.scale, index, expected, got)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _difference(ours: Tensor, oracle: Tensor) -> tuple[Tensor, float]:
    """ours - oracle in double precision, and its norm.

    Where the oracle is not finite, the difference is 0 if ours is the same and infinity if it is not.
    """
    wide, truth = _wide(ours), _wide(oracle)
    difference = wide - truth
    error = float(torch.linalg.vector_norm(difference))
    if not math.isfinite(error):
        same = (wide == truth) | (wide.isnan() & truth.isnan())
        at_infinities = torch.where(same, 0.0, math.inf).to(difference.dtype)
        difference = torch.where(torch.isfinite(truth), difference, at_infinities)
        error = float(torch.linalg.vector_norm(difference))
    return difference, error


def _norm(value: object) -> float:
    """Euclidean norm over the finite elements."""
    assert isinstance(value, Tensor)
    wide = _wide(value)
    norm = float(torch.linalg.vector_norm(wide))
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(wide), wide, 0.0)))


def _flag(
    kind: Kind,
    name: str,
    phase: str,
    rule: Rule,
    expected: object,
    got: object,
    message: str = "",
    *,
    same: bool | None = None,
) -> Row:
    differs = not same if same is not None else expected != got
    return Row(kind, name, phase, rule.label, math.inf if differs else 0.0, 0.0, 0.0, None, expected, got, message)
