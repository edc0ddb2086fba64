"""benchmarks/where.py counts what a step does: operations and bytes against those of the network's shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import where

import densenet
from lowtide.kernels import Kernels, TensorCalls, select

N, K, WIDE = 2, 12, 48  # images, growth, bottleneck
SIZES = (32 * 32, 16 * 16, 8 * 8)  # positions of the blocks of DenseNet-BC 22: three layers each
STARTS = (24, 30, 33)  # channels that a block begins with: half of what the one before ends with


def native() -> Kernels:
    kernels = select(torch.zeros(1, 1, 1))
    if kernels.name != "native":
        pytest.skip("not run: only the native kernels (a C++ compiler) have one pass for a norm and a product")
    return kernels


@pytest.mark.parametrize(("level", "again"), [("pointwise", 0), ("layer", 1)])
def test_a_dense_network(level: str, again: int) -> None:
    kind = type(native())
    before = dict(vars(kind))
    rows = where.where(densenet.bc100(level, batch=N, depth=22), repeats=2)
    assert dict(vars(kind)) == before, "the provider is as it was"
    found = {row.name: row for row in rows}
    layers = [(s, start + i * K) for s, start in zip(SIZES, STARTS, strict=True) for i in range(3)]
    bottlenecks = sum(2 * N * s * c * WIDE for s, c in layers)
    ends = [(s, start + 3 * K) for s, start in zip(SIZES[:2], STARTS[:2], strict=True)]
    transitions = sum(2 * N * s // 4 * c * (c // 2) for s, c in ends)
    threes = sum(2 * N * s * WIDE * K * 9 for s, _ in layers)
    stem = 2 * N * SIZES[0] * 3 * 24 * 9
    operations = {
        "norm_act_mix": (1 + again) * bottlenecks + transitions,
        "norm_act_mix_backward": 2 * bottlenecks,
        "norm_act_conv": threes,
        "norm_act_conv_backward": 2 * threes,
        "torch's convolutions": stem + transitions,
        "their backward": stem + transitions,
    }
    assert {name: found[name].operations for name in operations} == operations
    assert found["norm_act_conv"].moved == sum(4 * N * s * (WIDE + K) for s, _ in layers)
    assert found["norm_act_conv_backward"].moved == sum(4 * N * s * (WIDE + WIDE + K) for s, _ in layers)
    # x, grad and h are read, the gradient by x is read and written
    assert found["norm_act_mix_backward"].moved == sum(4 * N * s * (3 * c + 2 * WIDE) for s, c in layers)
    # once forward, and again in the backward for the gradient by the transition's weight
    assert found["norm_act_average_pool"].moved == 2 * sum(4 * N * c * (s + s // 4) for s, c in ends)
    pooled = sum(4 * N * s // 4 * (c + c // 2) for s, c in ends)
    assert found["torch's convolutions"].moved == 4 * N * SIZES[0] * (3 + 24) + pooled
    parameters = sum(p.numel() for p in densenet.densenet_bc(22, K).parameters())
    assert found["optimizer"].moved == 5 * 4 * parameters
    assert found["norm_act_conv"].calls == len(layers)
    assert [row.name for row in rows[-2:]] == ["other operations of torch", "Python and autograd"]
    assert all(row.seconds > 0 for row in rows)


def test_a_pass_that_calls_passes_counts_once() -> None:
    class Nested(TensorCalls):
        def act_backward_sums_(self, grad, x, scale, shift, act, mean):
            self.affine_add_(grad, None, x, scale, shift)
            return super().act_backward_sums_(grad, x, scale, shift, act, mean)

    x, grad = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    vector = torch.ones(3)
    with where.recorded(Nested()) as rows:
        Nested().act_backward_sums_(grad, x, vector, vector, "relu", vector)
        Nested().affine_add_(grad, None, x, vector, vector)
    # x read, the gradient read and written
    assert {name: row.moved for name, row in rows.items()} == {"act_backward_sums_": 288, "affine_add_": 288}
    assert set(vars(Nested)) >= {"act_backward_sums_"}
    assert "affine_add_" not in vars(Nested)


def test_the_floor_is_the_dearer_of_both() -> None:
    row = where.Row("a pass", 1, 0.008, operations=4e9, moved=2**20 * 100)
    assert row.floor(2e12, 1e11) == 0.002
    assert row.floor(2e12, 1e10) == 2**20 * 1e-8
    made = where.table([row, where.Row("Python", 0, 0.001)], 2e12, 1e11).splitlines()
    assert made[2:] == [
        "| a pass | 1 | 8.0 | 4.0 | 100 | 2.0 | 4.0 |",
        "| Python |  | 1.0 |  |  |  |  |",
        "| sum |  | 9.0 | 4.0 | 100 | 2.0 | 4.5 |",
    ]


def test_unknown_case_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(where.__file__)), "bc40"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: no case 'bc40'; expected one of {', '.join(where.STEPS)}\n"
