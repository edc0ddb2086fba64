"""Forwards before a backward, two backwards, accumulation, frozen parts, own loss and optimiser, other dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import lowtide


class _LastInputOnly(torch.autograd.Function):
    """Keeps its input on the module: right until the module runs twice before the backward."""

    @staticmethod
    def forward(ctx, x, weight, module):
        module.kept = x.detach()
        ctx.save_for_backward(weight)
        ctx.module = module
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        return dy @ weight, dy.T @ ctx.module.kept, None


class LastInputOnly(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _LastInputOnly.apply(input, self.weight, self)


class _FreesItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.used = False
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if ctx.used:
            raise RuntimeError("its workspace is gone")
        ctx.used = True
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x


class FreesItself(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _FreesItself.apply(input, self.weight)


def net(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(kind(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"forwards": 3}, {"accumulate": 2}, {"backward_twice": True}, {"steps": 1}])
def test_right_modules_pass_under_every_option(options: dict) -> None:
    assert lowtide.verify(net(), net(), X, **options).ok


def test_several_forwards_before_one_backward_find_a_workspace_of_the_module() -> None:
    assert lowtide.verify(net(), net(LastInputOnly), X).ok
    report = lowtide.verify(net(), net(LastInputOnly), X, forwards=2)
    assert [(f.kind, f.name) for f in report.failures] == [("param_grad", "0.weight")]
    assert report.first_module == "0"
    assert lowtide.verify(net(), net(LastInputOnly), X, accumulate=2).ok


def test_two_backwards_find_what_the_first_one_frees() -> None:
    assert lowtide.verify(net(), net(FreesItself), X).ok
    report = lowtide.verify(net(), net(FreesItself), X, backward_twice=True)
    assert [f.kind for f in report.failures] == ["error"]
    assert "its workspace is gone" in report.failures[0].traceback


def test_frozen_parts_get_no_gradient_on_either_side() -> None:
    report = lowtide.verify(net(), net(), X, frozen=["0", "2.bias"])
    assert report.ok
    assert {r.name for r in report.rows if r.kind == "param_grad"} == {"2.weight"}
    candidate = net()
    candidate[0].weight.requires_grad_(False)
    report = lowtide.verify(net(), candidate, X)
    assert [(f.kind, f.name) for f in report.failures] == [("missing_grad", "0.weight")]


def test_loss_with_target_and_an_optimiser() -> None:
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    for optimizer in (
        torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ):
        report = lowtide.verify(
            net(), net(), X, loss=nn.functional.cross_entropy, target=labels, optimizer=optimizer, steps=2
        )
        assert report.ok, str(report)
    report = lowtide.verify(net(), net(), X, loss=lambda output: output.square().mean())
    assert report.ok


def test_steps_without_an_input_gradient_are_part_of_the_run() -> None:
    report = lowtide.verify(net(), net(), X)
    phases = {r.phase for r in report.rows if r.kind == "input_grad" and r.dtype == "float64"}
    assert phases == {"step 1", "step 3", "eval with gradients"}
    phases = {r.phase for r in report.rows if r.kind == "output"}
    assert phases == {"step 1", "step 2", "step 3", "no_grad train forward"}


def test_parts_can_be_left_out() -> None:
    report = lowtide.verify(net(), net(), X, without=["no_grad_forward", "eval"])
    assert report.ok
    assert {r.phase for r in report.rows if r.dtype == "float64" and r.kind == "output"} == {
        f"step {i}" for i in (1, 2, 3)
    }
    assert not any(r.kind in ("eval_output", "hook") for r in report.rows)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"dtype": torch.float16}, "float16"),
        ({"autocast": True}, "autocast bfloat16"),
        ({"autocast": torch.float16, "dtype": torch.float32}, "autocast float16"),
    ],
)
def test_other_precisions_are_judged_beside_float64(options: dict, label: str) -> None:
    report = lowtide.verify(net(), net(), X, **options)
    assert report.ok
    assert {r.dtype for r in report.rows} == {"float64", label}
    assert {r.kind for r in report.rows if r.dtype == label} >= {"output", "param_grad", "eval_output"}
    steps = {r.phase for r in report.rows if r.dtype == label and r.kind == "param_grad"}
    assert steps == {"step 1", "step 2", "step 3"}  # a dtype that is asked for gets every step
    assert {r.dtype for r in lowtide.verify(net(), net(), X, dtype=torch.float64).rows} == {"float64"}


def test_a_batch_of_any_size_costs_few_runs() -> None:
    """Cost is counted in samples that pass through the reference, not timed: the bound is 40 plain steps."""
    samples = {"float64": 0, "float32": 0}

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            samples[str(input.dtype).removeprefix("torch.")] += len(input)
            return super().forward(input)

    x = torch.randn(64, 4)
    assert lowtide.verify(net(Counted), net(), x).ok
    # float64: 3 steps, a no_grad forward, an eval forward, its repetition from rounded weights, and twice 3 samples
    assert samples == {"float64": 64 * 6 + 2 * 3, "float32": 64 * 2}
