"""ListOps trees: values by an evaluator of its own, the rules, and the same trees in every process and on every day."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtide.data.listops import VOCABULARY, ListOpsRules, apply_operator, to_text, trees
from lowtide.data.listops_cache import cache_path, load_listops
from lowtide.errors import ArgumentError, DataError

SHORT = ListOpsRules(shorter=9, longer=60, n_train=300, n_validation=40, n_test=50)


def read_tree(words: list[str]) -> tuple[object, int, int]:
    """By recursion over the written tree: (tree, depth, words used); the generator works with a stack over tokens."""
    if words[0].isdigit():
        return int(words[0]), 1, 1
    assert words[0] in ("[MIN", "[MAX", "[MED", "[SM")
    arguments, depth, used = [], 0, 1
    while words[used] != "]":
        argument, below, n = read_tree(words[used:])
        arguments.append(argument)
        depth, used = max(depth, below), used + n
    assert 2 <= len(arguments) <= 10
    return (words[0][1:], arguments), depth + 1, used + 1


def value_of(tree: object) -> int:
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = [value_of(argument) for argument in arguments]
    return {
        "MIN": lambda: sorted(values)[0],
        "MAX": lambda: sorted(values)[-1],
        "MED": lambda: int(statistics.median(values)),
        "SM": lambda: int(str(sum(values))[-1]),
    }[operator]()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 9 ]", 9),
        ("[MED 7 2 9 4 ]", 5),
        ("[MED 1 2 ]", 1),
        ("[MED 3 9 1 ]", 3),
        ("[SM 7 2 9 4 ]", 2),
        ("[SM 5 5 ]", 0),
        ("[MAX 4 [SM 7 5 ] 3 ]", 4),
        ("[SM [MIN 8 6 ] [MED 9 0 8 [MAX 1 1 ] ] 9 ]", 9),
    ],
)
def test_worked_by_hand(text: str, value: int) -> None:
    tree, _, used = read_tree(text.split())
    assert used == len(text.split())
    assert value_of(tree) == value
    if text.count("[") == 1:
        operator = VOCABULARY.index(text.split()[0]) - 1
        assert apply_operator(operator, [int(word) for word in text.split()[1:-1]]) == value


def test_every_tree_keeps_the_rules_and_has_its_value() -> None:
    found = list(itertools.islice(trees(SHORT), 2000))
    depths, operators, digits = Counter(), Counter(), Counter()
    for tree in found:
        words = to_text(tree.tokens).split()
        assert len(words) == len(tree.tokens)
        assert 9 < len(words) < 60
        nested, depth, used = read_tree(words)
        assert used == len(words)
        assert value_of(nested) == tree.value
        depths[depth] += 1
        operators.update(word for word in words if word.startswith("["))
        digits.update(word for word in words if word.isdigit())
    assert len({tree.tokens for tree in found}) == len(found)
    assert {tree.value for tree in found} == set(range(10))
    assert max(depths) <= 10
    # drawn alike: within five standard deviations of a fair share
    for counts, kinds in ((operators, 4), (digits, 10)):
        total = sum(counts.values())
        assert len(counts) == kinds
        allowed = 5 * (total * (kinds - 1)) ** 0.5 / kinds
        assert all(abs(n - total / kinds) < allowed for n in counts.values())


def test_the_published_limits() -> None:
    for tree in itertools.islice(trees(ListOpsRules()), 100):
        assert 500 < len(tree.tokens) < 2000
        nested, depth, _ = read_tree(to_text(tree.tokens).split())
        assert value_of(nested) == tree.value
        assert depth <= 10
    assert ListOpsRules() == ListOpsRules(0, 500, 2000, 96_000, 2_000, 2_000)


def test_the_same_in_every_process() -> None:
    code = (
        "import hashlib, itertools; from lowtide.data.listops import *;"
        "r = ListOpsRules(shorter=9, longer=60);"
        "rows = [t.tokens + bytes([t.value]) for t in itertools.islice(trees(r), 500)];"
        "print(hashlib.sha256(b''.join(rows)).hexdigest())"
    )
    answers = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        answers.add(done.stdout.strip())
    here = b"".join(tree.tokens + bytes([tree.value]) for tree in itertools.islice(trees(SHORT), 500))
    assert answers == {hashlib.sha256(here).hexdigest()}
    other = itertools.islice(trees(ListOpsRules(seed=1, shorter=9, longer=60)), 500)
    assert {tree.tokens for tree in other} != {tree.tokens for tree in itertools.islice(trees(SHORT), 500)}


def test_parts_share_no_tree_and_are_read_again_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_listops(SHORT, tmp_path)
    assert [len(part.labels) for part in first] == [300, 40, 50]
    rows = [
        bytes(part.tokens[part.ends[i] : part.ends[i + 1]].tolist()) for part in first for i in range(len(part.labels))
    ]
    assert len(set(rows)) == 390
    assert [path.name for path in (tmp_path / "listops").iterdir()] == [cache_path(SHORT, tmp_path).name]

    monkeypatch.setattr("lowtide.data.listops_cache.trees", None)  # whoever draws again, fails
    for a, b in zip(first, load_listops(SHORT, tmp_path), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.ends, b.ends)
        assert torch.equal(a.labels, b.labels)


def test_more_training_trees_change_no_other_part(tmp_path: Path) -> None:
    few, many = (load_listops(dataclasses.replace(SHORT, n_train=n), tmp_path) for n in (100, 200))
    for part in (1, 2):
        rows = torch.arange(len(few[part].labels))
        assert all(torch.equal(a, b) for a, b in zip(few[part].inputs(rows), many[part].inputs(rows), strict=True))


def test_padding_lies_behind_each_row(tmp_path: Path) -> None:
    part = load_listops(SHORT, tmp_path)[0]
    rows = torch.tensor([5, 0, 299])
    x, lengths = part.inputs(rows)
    assert x.shape == (3, int(lengths.max()))
    for i, row in enumerate(rows.tolist()):
        own = part.tokens[part.ends[row] : part.ends[row + 1]].to(torch.int64)
        assert len(own) == lengths[i]
        assert torch.equal(x[i, : len(own)], own)
        assert not x[i, len(own) :].any()
        assert int(own.min()) > 0
        assert value_of(read_tree(to_text(own.tolist()).split())[0]) == part.labels[row]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(DataError, match=r"expected to write the trees, got No space left on device"):
            load_listops(SHORT, tmp_path)
    assert list((tmp_path / "listops").iterdir()) == []
    assert len(load_listops(SHORT, tmp_path)[0].labels) == 300


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    load_listops(SHORT, tmp_path)
    path = cache_path(SHORT, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"\.npz: expected a whole file of trees, got .*; delete it"):
        load_listops(SHORT, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shorter": 60}, "--listops-length: expected MORE_THAN FEWER_THAN"),
        ({"shorter": -1}, "--listops-length: expected MORE_THAN FEWER_THAN"),
        ({"n_train": 0}, "--listops-trees: expected TRAIN VALIDATION TEST"),
        ({"n_test": 0}, "--listops-trees: expected TRAIN VALIDATION TEST"),
    ],
)
def test_impossible_rules(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_listops(dataclasses.replace(SHORT, **changes), tmp_path)
    assert not (tmp_path / "listops").exists()


def test_too_few_trees_within_the_limits_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four operators and two digits each: 400 trees of four tokens exist."""
    monkeypatch.setattr("lowtide.data.listops.PATIENCE", 300_000)
    found = []
    with pytest.raises(ArgumentError, match=r"enough different trees, got no new one in 300,000 draws after 400"):
        found.extend(itertools.islice(trees(ListOpsRules(shorter=3, longer=5)), 1000))
    only = trees(ListOpsRules(shorter=3, longer=5))
    assert len({tree.tokens for tree in itertools.islice(only, 400)}) == 400
