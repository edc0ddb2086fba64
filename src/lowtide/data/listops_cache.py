"""ListOps trees on disk: made once for each set of rules, then read. A file is whole or absent."""

from __future__ import annotations

import dataclasses
import itertools
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowtide.data.listops import VOCABULARY, ListOpsRules, trees
from lowtide.data.sequences import TokenRows
from lowtide.errors import DataError, describe

DEFAULT_ROOT = Path("data")
VERSION = 1


def load_listops(rules: ListOpsRules, root: Path | None = None) -> tuple[TokenRows, TokenRows, TokenRows]:
    """Training, validation and test trees; from the file in `root`/listops, which is made if it is not there.

    The test trees are drawn first and the training trees last, so that more training trees change no other part.

    Raises:
        ArgumentError: limits that leave too few trees.
        DataError: the file is damaged, or cannot be written.
    """
    rules.check()
    path = cache_path(rules, root or DEFAULT_ROOT)
    if not path.is_file():
        _write(path, _make(rules))
    tokens, ends, values = _read(path, rules)
    cuts = (0, rules.n_test, rules.n_test + rules.n_validation, len(values))
    test, validation, train = (TokenRows(tokens, ends[a : b + 1], values[a:b]) for a, b in itertools.pairwise(cuts))
    return train, validation, test


def cache_path(rules: ListOpsRules, root: Path) -> Path:
    """The file of these rules; its name holds all of them."""
    name = "-".join(map(str, dataclasses.astuple(rules)))
    return root / "listops" / f"listops-v{VERSION}-{name}.npz"


def _make(rules: ListOpsRules) -> dict[str, np.ndarray[Any, Any]]:
    found = list(itertools.islice(trees(rules), rules.n_test + rules.n_validation + rules.n_train))
    return {
        "tokens": np.frombuffer(b"".join(tree.tokens for tree in found), np.uint8),
        "ends": np.cumsum([0, *(len(tree.tokens) for tree in found)], dtype=np.int64),
        "values": np.array([tree.value for tree in found], np.int64),
    }


def _write(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    # beside its final name, under one of this process's own: two runs may make the same file at once
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        fix = "name another folder by --data-dir"
        raise DataError(
            describe(expected="to write the trees", got=error.strerror or error, where=str(path), fix=fix)
        ) from None


def _read(path: Path, rules: ListOpsRules) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        # opened here: numpy leaves a damaged file open
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            tokens, ends, values = (torch.from_numpy(file[name]) for name in ("tokens", "ends", "values"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            describe(expected="a whole file of trees", got=reason, where=str(path), fix="delete it: it is made again")
        ) from None
    n = rules.n_test + rules.n_validation + rules.n_train
    fits = len(values) == n and len(ends) == n + 1 and int(ends[-1]) == len(tokens)
    if not (fits and int(tokens.max()) < len(VOCABULARY)):
        got = f"{len(values)} values, {len(ends) - 1} trees, {len(tokens)} tokens"
        fix = "delete it: it is made again"
        raise DataError(describe(expected=f"{n} trees", got=got, where=str(path), fix=fix))
    return tokens, ends, values
