"""What a verification found: every comparison, the failures among them, and a table that says so."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from lowtide.errors import ParityError

Kind = Literal[
    "output",
    "input_grad",
    "param_grad",
    "missing_grad",
    "buffer",
    "eval_output",
    "rng",
    "requires_grad",
    "input_changed",
    "hook",
    "error",
    "empty",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

SHOWN_PER_KIND = 12
CONSEQUENCES_PER_KIND = 3


@dataclass(frozen=True)
class Row:
    """One comparison of one tensor (or flag): `error` and `allowed` are Euclidean norms over the whole tensor."""

    kind: Kind
    name: str
    phase: str
    dtype: str
    error: float
    allowed: float
    scale: float = 0.0
    index: tuple[int, ...] | None = None
    expected: object = None
    got: object = None
    message: str = ""
    traceback: str = ""

    @property
    def ok(self) -> bool:
        """False for NaN as well: a comparison with NaN is never within bounds."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Failure(Row):
    """The first comparison of this kind and name that was out of bounds; `phases` lists all of them."""

    phases: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for people."""
        return f"{self.kind} {self.name}: {self.message}" if self.message else f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Margin:
    """How far the reference stays from its kinks: smallest |input of a kink| / RMS of that input, against `needed`."""

    dtype: str
    phase: str
    smallest: float
    needed: float
    count: int
    where: str

    @property
    def decidable(self) -> bool:
        """Whether rounding in `dtype` is too small to push any kink to its other side."""
        return self.smallest > self.needed

    def line(self) -> str:
        """One line for people."""
        if self.count == 0:
            return f"{self.dtype}, {self.phase}: no kinks (ReLU, max-pool, comparisons): gradients decidable"
        verdict = "gradients decidable" if self.decidable else "gradients not decidable in this dtype, not judged"
        return (
            f"{self.dtype}, {self.phase}: nearest of {self.count:,} kink inputs ({self.where}) is {self.smallest:.1e}"
            f" of its scale away, needed {self.needed:.1e}: {verdict}"
        )


@dataclass
class ParityReport:
    """Is the candidate the same network as the reference?

    Attributes:
        ok: no failure.
        failures: one `Failure` per kind and tensor, causes first. What follows from an earlier failure of the same step
            (gradients after a wrong output) is in `consequences` instead.
        first_module: the first module, in execution order, whose output departs; for gradients, in the order of the
            backward. "" is the network itself (its own forward, outside its children). None: nothing to name.
        rows: every comparison made.
        margins: how far the reference stays from its kinks, per dtype; `notes`: what was not judged, and why.
    """

    reference: str
    candidate: str
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    consequences: list[Failure] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first_module: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the candidate passed: nothing failed."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise `ParityError`, with the table as its message, unless `ok`."""
        if not self.ok:
            raise ParityError(str(self))

    def to_json(self) -> str:
        """The report as a JSON object: ok, failures, consequences, first_module, comparisons, margins, notes."""
        fields = {
            "ok": self.ok,
            "reference": self.reference,
            "candidate": self.candidate,
            "first_module": self.first_module,
            "failures": [_plain(f) for f in self.failures],
            "consequences": [_plain(f) for f in self.consequences],
            "comparisons": [_plain(s) for s in summarise(self.rows)],
            "margins": [{**_plain(m), "decidable": m.decidable} for m in self.margins],
            "notes": self.notes,
        }
        return json.dumps(fields, indent=2, allow_nan=False)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=240, color_system=None, highlight=False, markup=False, emoji=False)
        console.print(f"reference {self.reference}\ncandidate {self.candidate}")
        console.print(_summary_table(summarise(self.rows)))
        if self.failures:
            console.print(_failure_table("failures", self.failures, SHOWN_PER_KIND))
        if self.consequences:
            console.print(_failure_table("which follow from these", self.consequences, CONSEQUENCES_PER_KIND))
        for failure in self.failures:
            if failure.traceback:
                console.print(f"the candidate's traceback ({failure.phase}):\n{failure.traceback.rstrip()}")
        for margin in self.margins:
            console.print(margin.line())
        for note in self.notes:
            console.print(f"note: {note}")
        console.print(self.verdict())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def verdict(self) -> str:
        """The last line of the table."""
        if self.ok:
            return f"PASSED: the candidate is the same network ({len(self.rows):,} comparisons)"
        counts = {kind: sum(f.kind == kind for f in self.failures) for kind in KINDS}
        listed = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        where = "" if self.first_module is None else f"; first in {self.first_module or 'the network itself'}"
        return f"FAILED: {listed}{where}"


@dataclass(frozen=True)
class Summary:
    """All comparisons of one kind in one dtype: how many, how many failed, and the one nearest to its bound."""

    dtype: str
    kind: Kind
    compared: int
    failed: int
    worst: float  # error / allowed of the worst
    worst_name: str
    worst_phase: str


def summarise(rows: list[Row]) -> list[Summary]:
    """One `Summary` per dtype and kind, in the order in which they were compared."""
    groups: dict[tuple[str, Kind], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.dtype, row.kind), []).append(row)
    summaries = []
    for (dtype, kind), members in groups.items():
        worst = max(members, key=_ratio)
        failed = sum(not row.ok for row in members)
        summaries.append(Summary(dtype, kind, len(members), failed, _ratio(worst), worst.name, worst.phase))
    return summaries


def _ratio(row: Row) -> float:
    if math.isnan(row.error) or (row.allowed == 0 and row.error > 0):
        return math.inf
    return row.error / row.allowed if row.allowed else 0.0


def _plain(item: object) -> dict[str, object]:
    """A dataclass as JSON values; infinities and NaN, which JSON lacks, as strings."""
    assert dataclasses.is_dataclass(item)
    assert not isinstance(item, type)
    values = dataclasses.asdict(item)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else _listed(v) for k, v in values.items()}


def _listed(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _summary_table(summaries: list[Summary]):
    from rich.table import Table

    table = Table(title=None, box=None, pad_edge=False)
    for name in ("dtype", "kind", "compared", "failed", "error/allowed", "worst"):
        table.add_column(
            name, justify="left" if name in ("dtype", "kind", "worst") else "right", no_wrap=name != "worst"
        )
    for s in summaries:
        worst = f"{s.worst_name} ({s.worst_phase})"
        table.add_row(s.dtype, s.kind, f"{s.compared:,}", f"{s.failed:,}", f"{s.worst:.1e}", worst)
    return table


def _failure_table(title: str, failures: list[Failure], shown: int):
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("kind", "name", "error", "allowed", "at", "expected", "got", "step"):
        table.add_column(name, overflow="fold")
    for kind in dict.fromkeys(f.kind for f in failures):
        members = [f for f in failures if f.kind == kind]
        for f in members[:shown]:
            at = "" if f.index is None else str(list(f.index))
            step = f"{f.phase} ({f.dtype})"
            table.add_row(
                f.kind, f.name, _number(f.error), _number(f.allowed), at, _number(f.expected), _number(f.got), step
            )
            if f.message:
                table.add_row("", f"  {f.message}")
        if len(members) > shown:
            table.add_row(kind, f"... and {len(members) - shown} more")
    return table
