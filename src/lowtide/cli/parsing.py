"""Flags to values, by tyro, with its complaints made one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from lowtide.errors import LowtideError

T = TypeVar("T")


def parse(
    prog: str, target: Callable[..., T], args: Sequence[str], default: T | None = None, flag_pairs: bool = False
) -> T:
    """Call `target` (a dataclass, or a function that only records its arguments) with the values of the flags.

    default: values for the flags that are not given, instead of the target's own. flag_pairs: each switch is --name
    and --no-name, whatever its default is; otherwise only the one that changes it exists.

    Raises:
        LowtideError: the flags cannot be parsed. SystemExit(0) after --help.
    """
    complaint = io.StringIO()
    config = () if flag_pairs else (tyro.conf.FlagCreatePairsOff,)
    try:
        with contextlib.redirect_stderr(complaint):
            start: dict[str, Any] = {} if default is None else {"default": default}
            return tyro.cli(target, prog=prog, args=args, config=config, **start)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise LowtideError(f"{prog}: {_one_line(complaint.getvalue())}; see {prog} --help") from None


def _one_line(box: str) -> str:
    """The parser's message without its frame: the rows above the rule, joined."""
    rows = []
    for row in box.splitlines():
        text = row.strip(" │")
        if text.startswith(("╭", "╰")):
            continue
        if text and not text.strip("─"):
            break
        rows.append(text)
    return " ".join(rows).rstrip(".")
