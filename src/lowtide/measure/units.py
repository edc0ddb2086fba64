"""Bytes, seconds and counts as text. Numbers stay plain ints and floats everywhere else."""

from __future__ import annotations

import re

from lowtide.errors import ArgumentError, describe

_STEPS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: int) -> str:
    """Bytes in powers of 1024.

    >>> format_bytes(512), format_bytes(3 * 2**20), format_bytes(-(2**31))
    ('512 B', '3.0 MiB', '-2.0 GiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for step in _STEPS:
        size /= 1024
        if abs(size) < 1023.95 or step == _STEPS[-1]:
            return f"{size:.1f} {step}"
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Seconds with a unit that leaves three significant digits.

    >>> format_seconds(0.00123), format_seconds(12.34)
    ('1.23 ms', '12.3 s')
    """
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_count(count: float) -> str:
    """A large count in powers of 1000.

    >>> format_count(950), format_count(1_230_000)
    ('950', '1.23 M')
    """
    for limit, factor, unit in ((1e3, 1.0, ""), (1e6, 1e3, " k"), (1e9, 1e6, " M"), (1e12, 1e9, " G")):
        if count < limit:
            return f"{count / factor:.3g}{unit}"
    return f"{count / 1e12:.3g} T"


def parse_bytes(text: str, where: str) -> int:
    """Bytes from text such as "500MiB", "1.5 GiB", "2GB" (powers of 1000) or "4096".

    >>> parse_bytes("500MiB", "--memory"), parse_bytes("2 GB", "--memory"), parse_bytes("4096", "--memory")
    (524288000, 2000000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?\s*", text.lower())
    if match is None:
        raise ArgumentError(describe(expected="a size such as 500MiB or 2GiB", got=repr(text), where=where))
    number, step, binary = match.groups()
    power = " kmgt".index(step) if step else 0
    return int(float(number) * (1024 if binary else 1000) ** power)
