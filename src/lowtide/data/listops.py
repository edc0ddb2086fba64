"""ListOps: nested lists of MIN, MAX, MED and SM over digits, and their value, 0 to 9.

    [MAX 4 [SM 7 5 ] 3 ]  ->  4

Every tree is drawn from a stream of random numbers that depends on the seed alone (not on Python's hash, the machine or
the process), trees that were drawn before are left out, and the brackets stay in the tokens: without them the task has
no answer. The published generator's splits depend on the hash seed of the process that made them, so no one can make
them again; the rules here are the same.

Source: Nangia and Bowman 2018, arXiv 1804.06028; Tay et al. 2020 (Long Range Arena), arXiv 2011.04006, section 2.2.1.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.data.seeds import derive_seed
from lowtide.errors import ArgumentError, describe

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
# token 0 is for padding
VOCABULARY = ("", *OPERATORS, CLOSE, *"0123456789")
FIRST_OPERATOR, CLOSE_TOKEN, FIRST_DIGIT = 1, VOCABULARY.index(CLOSE), VOCABULARY.index("0")
OPERATOR_PROBABILITY = 0.25
MAX_ARGUMENTS = 10
MAX_DEPTH = 10  # the root is at depth 1; at the last depth there are digits alone
# draws in a row without a new tree: then the limits leave (almost) none
PATIENCE = 1_000_000


@dataclass(frozen=True)
class ListOpsRules:
    """Which trees are kept, and how many: more than `shorter` and fewer than `longer` tokens; digits count, and an
    operator counts two (its bracket too)."""

    seed: int = 0
    shorter: int = 500
    longer: int = 2000
    n_train: int = 96_000
    n_validation: int = 2_000
    n_test: int = 2_000

    def check(self) -> None:
        """Raise `ArgumentError` for limits that no tree meets, or counts that are none."""
        if not 0 <= self.shorter < self.longer - 1 or self.longer < 5:
            got = f"{self.shorter} {self.longer}"
            expected = "MORE_THAN FEWER_THAN tokens, with a length in between (the shortest tree has 4)"
            raise ArgumentError(describe(expected=expected, got=got, where="--listops-length"))
        counts = (self.n_train, self.n_validation, self.n_test)
        if self.n_train < 1 or self.n_validation < 0 or self.n_test < 1:
            expected = "TRAIN VALIDATION TEST trees, 1, 0 and 1 at least"
            raise ArgumentError(describe(expected=expected, got=" ".join(map(str, counts)), where="--listops-trees"))


@dataclass(frozen=True)
class Tree:
    """tokens: indices into `VOCABULARY`. value: 0 to 9."""

    tokens: bytes
    value: int


def trees(rules: ListOpsRules) -> Iterator[Tree]:
    """Distinct trees that keep the rules' limits, without end, the same ones whenever the seed and limits are.

    Raises:
        ArgumentError: a million draws in a row gave no new tree.
    """
    draw = random.Random(derive_seed(rules.seed, "listops", rules.shorter, rules.longer)).random
    seen: set[bytes] = set()
    misses = 0
    while True:
        tree = _draw_tree(draw, rules.longer)
        # 16 bytes of a digest instead of up to 2,000 of tokens
        key = b"" if tree is None else hashlib.blake2b(tree.tokens, digest_size=16).digest()
        if tree is None or len(tree.tokens) <= rules.shorter or key in seen:
            misses += 1
            if misses == PATIENCE:
                got = f"no new one in {PATIENCE:,} draws after {len(seen):,}"
                where = f"--listops-length {rules.shorter} {rules.longer}"
                fix = "widen the limits or ask for fewer trees"
                raise ArgumentError(describe(expected="enough different trees", got=got, where=where, fix=fix))
            continue
        misses = 0
        seen.add(key)
        yield tree


def _draw_tree(draw: Callable[[], float], longer: int) -> Tree | None:
    """One tree by its rules, or None for a lone digit or one that grows to `longer` tokens."""
    if draw() >= OPERATOR_PROBABILITY:
        return None
    tokens = bytearray()
    # for each open list: its operator, the arguments to come, and the values of those that were read
    operators: list[int] = []
    to_come: list[int] = []
    values: list[list[int]] = [[]]

    def open_list() -> None:
        operator = int(draw() * len(OPERATORS))
        tokens.append(FIRST_OPERATOR + operator)
        operators.append(operator)
        to_come.append(2 + int(draw() * (MAX_ARGUMENTS - 1)))
        values.append([])

    open_list()
    while operators:
        # every open list will need its bracket
        if len(tokens) + len(operators) >= longer:
            return None
        if to_come[-1] == 0:
            tokens.append(CLOSE_TOKEN)
            to_come.pop()
            value = apply_operator(operators.pop(), values.pop())
            values[-1].append(value)
            continue
        to_come[-1] -= 1
        if len(operators) < MAX_DEPTH - 1 and draw() < OPERATOR_PROBABILITY:
            open_list()
        else:
            digit = int(draw() * 10)
            tokens.append(FIRST_DIGIT + digit)
            values[-1].append(digit)
    return Tree(bytes(tokens), values[0][0])


def apply_operator(operator: int, arguments: Sequence[int]) -> int:
    """Value of a list whose operator is `OPERATORS[operator]`.

    >>> [apply_operator(operator, (7, 2, 9, 4)) for operator in range(4)]  # MIN, MAX, MED (5.5, truncated), SM (22)
    [2, 9, 5, 2]
    """
    if operator == 0:
        return min(arguments)
    if operator == 1:
        return max(arguments)
    if operator == 2:
        ordered, half = sorted(arguments), len(arguments) // 2
        return ordered[half] if len(arguments) % 2 else (ordered[half - 1] + ordered[half]) // 2
    return sum(arguments) % 10


def to_text(tokens: Sequence[int]) -> str:
    """The tree as it is written: `[MAX 4 3 ]`."""
    return " ".join(VOCABULARY[token] for token in tokens)
