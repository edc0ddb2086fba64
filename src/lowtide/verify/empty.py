"""Comparisons that could not have failed: a verification made of them proves nothing, and says so."""

from __future__ import annotations

from lowtide.verify.findings import Findings
from lowtide.verify.report import Kind, Row
from lowtide.verify.trees import Inputs, is_inexact

_NAMED = 6


def is_empty(row: Row) -> bool:
    """Whether an answer off by 1 % would pass; then its zero and its negative are no better guarded against."""
    return 0.01 * row.scale <= row.allowed


def find_empty(findings: Findings, inputs: Inputs) -> None:
    """Fail with kind `empty` where all inputs are zero, all outputs are, or most parameters get no gradient.

    Only the float64 pass counts: in bfloat16 a rounding unit alone is almost 1 %.
    """
    given = [t for t in inputs.tensors().values() if is_inexact(t)]
    if given and not any(bool(t.any()) for t in given):
        findings.add_empty("input", "inputs", "every input is zero: give inputs that the answer depends on")
    rows = findings.report.rows
    empty, of = _names(rows, "output")
    if len(empty) == of:
        what = "zero, not finite, or so small that zero would pass" if of else "no output to compare"
        findings.add_empty("output", "train", what)
    empty, of = _names(rows, "param_grad")
    if 2 * len(empty) > of:
        message = f"{len(empty)} of {of} parameters have no gradient to compare, or a zero one: {_listed(empty)}"
        findings.add_empty("param_grad", "train", message)
    elif empty:
        findings.report.notes.append(
            f"zero gradients, judged against the largest gradient in the model: {_listed(empty)}"
        )
    empty, of = _names(rows, "input_grad")
    if of and len(empty) == of:
        findings.report.notes.append(f"zero input gradients, which any backward would give: {_listed(empty)}")


def _names(rows: list[Row], kind: Kind) -> tuple[list[str], int]:
    """The names whose float64 comparisons were all empty, and how many names there are."""
    names: dict[str, bool] = {}
    for row in rows:
        if row.kind == kind and row.dtype == "float64":
            names[row.name] = names.get(row.name, True) and is_empty(row)
    return [name for name, empty in names.items() if empty], len(names)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
