"""From failed comparisons to failures: one per kind and tensor, causes apart from what follows from them."""

from __future__ import annotations

import dataclasses
import traceback

from torch import nn

from lowtide.verify.report import Failure, Kind, ParityReport, Row
from lowtide.verify.run import RunError
from lowtide.verify.subject import Subject

_GRADIENTS: tuple[Kind, ...] = ("input_grad", "param_grad", "missing_grad")


class Findings:
    """Collects the rows of every phase into a report."""

    def __init__(self, report: ParityReport) -> None:
        self.report = report

    def add(self, rows: list[Row]) -> None:
        """Add the comparisons of one phase of one dtype."""
        self.report.rows += rows
        failed = [row for row in rows if not row.ok]
        kinds: set[Kind] = {row.kind for row in failed}
        for row in failed:
            follows = self._explained(row, kinds)
            self._put(self.report.consequences if follows else self.report.failures, row)

    def _explained(self, row: Row, kinds: set[Kind]) -> bool:
        """Whether an earlier part of the same phase, or a wrong output in train mode, already explains the failure."""
        if row.kind in (*_GRADIENTS, "buffer") and kinds & {"output", "eval_output"}:
            return True
        if row.kind in _GRADIENTS and "requires_grad" in kinds:
            return True
        return row.kind == "eval_output" and any(f.kind == "output" for f in self.report.failures)

    @staticmethod
    def _put(failures: list[Failure], row: Row) -> None:
        for i, known in enumerate(failures):
            if (known.kind, known.name) == (row.kind, row.name):
                failures[i] = dataclasses.replace(known, phases=(*known.phases, row.phase))
                return
        failures.append(Failure(**dataclasses.asdict(row), phases=(row.phase,)))

    def candidate_raised(self, error: RunError, label: str, candidate: Subject, kind: Kind = "error") -> None:
        """The candidate raised: a failure with its traceback, from the candidate's first frame on."""
        cause = error.cause
        name = raising_module(candidate, cause)
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if "/lowtide/verify/" not in f.filename]
        lines = traceback.format_list(frames) + traceback.format_exception_only(cause)
        row = Row(
            kind,
            error.phase if name is None else name or type(candidate.module).__name__,
            error.phase,
            label,
            float("inf"),
            0.0,
            message=f"the candidate raised {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}",
            traceback="".join(lines),
        )
        self.report.rows.append(row)
        self._put(self.report.failures, row)
        if self.report.first_module is None:
            self.report.first_module = name

    def add_empty(self, name: str, phase: str, message: str) -> None:
        """The check would pass whatever the answer."""
        row = Row("empty", name, phase, "float64", float("inf"), 0.0, message=message)
        self.report.rows.append(row)
        self._put(self.report.failures, row)


def raising_module(candidate: Subject, cause: BaseException) -> str | None:
    """The innermost module of the candidate on the traceback, by name; None where it raised outside all of them."""
    name, trace = None, cause.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            known = candidate.name_of(owner)
            name = name if known is None else known
        trace = trace.tb_next
    return name
