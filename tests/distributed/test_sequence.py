"""Sequence parallel training against one process on the whole sequence."""

from __future__ import annotations

import pytest
import torch
from launch import launch
from sequence_cases import CASES, join, train
from torch import Tensor


def all_cases(rank, world_size):
    return {(case.name, level): train(case, level, rank, world_size) for case in CASES for level in case.levels}


def differences(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> list[str]:
    """Names of what differs by more than `tolerance` of its scale; a gradient's is at least the largest gradient's
    rounding, since that of a bias before a batch norm is zero."""
    assert got.keys() == want.keys()
    largest = max(float(v.norm()) for name, v in want.items() if "grad" in name)
    assert largest > 0
    wrong = []
    for name, value in want.items():
        scale = largest if "grad" in name else max(float(value.norm()), 1e-3)
        assert got[name].shape == value.shape, name
        if float((got[name] - value).norm()) > tolerance * scale or not bool(torch.isfinite(got[name]).all()):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process(world_size):
    found = launch(all_cases, world_size)
    for case in CASES:
        plain = train(case, "none")
        assert differences({name: 1.01 * value for name, value in plain.items()}, plain, 1e-9)
        for level in case.levels:
            got = join([rank[case.name, level] for rank in found], case)
            assert differences(got, plain, 1e-9) == [], (case.name, level)
