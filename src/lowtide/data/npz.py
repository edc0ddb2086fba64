"""Sequences of one's own: an .npz file with arrays x, y and perhaps lengths, and perhaps a test part.

    x        (N, L, d) or (N, L), numbers; or (N, L) integers: tokens
    y        (N,) integers: classes from 0 on
    lengths  (N,) integers 1..L: how much of each row counts, from the left (left out: all of it)

x_test, y_test and lengths_test are the test part; without them a tenth of the rows is set aside for it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.data.sequences import ArrayRows
from lowtide.errors import DataError, describe

NAMES = ("x", "y", "lengths", "x_test", "y_test", "lengths_test")


@dataclass(frozen=True)
class NpzArrays:
    """What the file holds. vocabulary: one more than the largest token, None for numbers."""

    rows: ArrayRows
    test: ArrayRows | None
    n_classes: int
    vocabulary: int | None


def read_npz(path: Path) -> NpzArrays:
    """Read and check the file.

    Raises:
        DataError: no such file, a damaged one, arrays missing, unknown, or of a wrong shape, type or content.
    """
    arrays = _load(path)
    unknown = sorted(set(arrays) - set(NAMES))
    if unknown:
        raise DataError(describe(expected=f"arrays {', '.join(NAMES)}", got=", ".join(unknown), where=str(path)))
    rows = _part(arrays, "", path)
    test = _part(arrays, "_test", path) if any(name.endswith("_test") for name in arrays) else None
    parts = [rows] if test is None else [rows, test]
    if test is not None and (test.x.shape[2:] != rows.x.shape[2:] or test.x.dtype != rows.x.dtype):
        expected = f"rows like those of x, {_say(rows.x)}"
        raise DataError(describe(expected=expected, got=_say(test.x), where=f"{path}: x_test"))
    tokens = not rows.x.is_floating_point()
    return NpzArrays(
        rows,
        test,
        n_classes=1 + max(int(part.labels.max()) for part in parts),
        vocabulary=1 + max(int(part.x.max()) for part in parts) if tokens else None,
    )


def _load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        raise DataError(describe(expected="an .npz file", got="no such file", where=str(path)))
    try:
        # opened here: numpy leaves a damaged file open
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("a single array; save several with numpy.savez")
            return {name: file[name] for name in file}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(describe(expected="a whole .npz file of plain arrays", got=reason, where=str(path))) from None


def _part(arrays: Mapping[str, np.ndarray[Any, Any]], end: str, path: Path) -> ArrayRows:
    for name in (f"x{end}", f"y{end}"):
        if name not in arrays:
            got = ", ".join(sorted(arrays)) or "none"
            raise DataError(describe(expected=f"an array {name}", got=got, where=str(path)))
    x, y = arrays[f"x{end}"], arrays[f"y{end}"]
    where = f"{path}: x{end}"
    number, integer = np.issubdtype(x.dtype, np.floating), np.issubdtype(x.dtype, np.integer)
    if x.ndim not in ((2, 3) if number else (2,)) or not (number or integer) or 0 in x.shape:
        expected = "numbers (N, L) or (N, L, d), or integer tokens (N, L), none of them 0"
        raise DataError(describe(expected=expected, got=_say(x), where=where))
    labels = _integers(y, len(x), f"{path}: y{end}", 0, None)
    lengths = None
    if f"lengths{end}" in arrays:
        lengths = _integers(arrays[f"lengths{end}"], len(x), f"{path}: lengths{end}", 1, x.shape[1])
    if integer:
        if int(x.min()) < 0:
            raise DataError(describe(expected="tokens from 0 on", got=int(x.min()), where=where))
        return ArrayRows(torch.from_numpy(x.astype(np.int64)), labels, lengths)
    values = torch.from_numpy(x.astype(np.float32)).reshape(*x.shape[:2], -1)
    _check_finite(values, lengths, where)
    return ArrayRows(values, labels, lengths)


def _integers(array: np.ndarray[Any, Any], n: int, where: str, least: int, most: int | None) -> Tensor:
    if array.shape != (n,) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(describe(expected=f"integers ({n},), one for each row of x", got=_say(array), where=where))
    wrong = np.flatnonzero((array < least) | (array > (array if most is None else most)))
    if len(wrong):
        expected = f"values {least}..{most}" if most is not None else f"values of {least} or more"
        got = f"{array[wrong[0]]} in row {wrong[0]} ({len(wrong)} such values)"
        raise DataError(describe(expected=expected, got=got, where=where))
    return torch.from_numpy(array.astype(np.int64))


def _check_finite(x: Tensor, lengths: Tensor | None, where: str) -> None:
    bad = ~x.isfinite().all(dim=2)
    if lengths is not None:
        # what lies at padding is not read
        bad &= torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    if bad.any():
        row, position = bad.nonzero()[0].tolist()
        got = f"NaN or Inf in row {row}, position {position} ({int(bad.sum())} such positions)"
        raise DataError(describe(expected="finite numbers", got=got, where=where))


def _say(array: np.ndarray[Any, Any] | Tensor) -> str:
    return f"{tuple(array.shape)} {str(array.dtype).removeprefix('torch.')}"
