"""What a conversion did, and what it left with which reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Skipped(NamedTuple):
    """A module that stays as it was, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """`converted`: names of the modules that run lean. `kinds`: what each became. `skipped`: what was left, and why."""

    converted: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table: one line per module."""
        lines = [f"converted {len(self.converted)}, skipped {len(self.skipped)}"]
        lines += [f"  {name or '(the model)'}: {self.kinds[name]}" for name in self.converted]
        lines += [f"  {name or '(the model)'}: left as it is: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Plain lists and strings."""
        return {
            "converted": [{"name": name, "kind": self.kinds[name]} for name in self.converted],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
        }
