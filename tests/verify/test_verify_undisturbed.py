"""The caller's modules, gradients, generators and modes are as they were."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import lowtide


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(24, 3))


def test_modules_keep_weights_buffers_gradients_flags_modes_and_hooks() -> None:
    torch.manual_seed(0)
    reference, candidate, x = net(), net(), torch.randn(3, 2, 8, requires_grad=True)
    calls: list[str] = []
    reference[0].register_forward_hook(lambda *_: calls.append("hook"))
    candidate[1].eval()
    candidate[4].weight.requires_grad_(False)
    reference[0].weight.grad = torch.ones_like(reference[0].weight)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (reference, candidate)]
    hooks = [len(m._forward_hooks) for m in (*reference.modules(), *candidate.modules())]

    lowtide.verify(reference, candidate, x, frozen=["4.weight"])

    for module, state in zip((reference, candidate), before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert hooks == [len(m._forward_hooks) for m in (*reference.modules(), *candidate.modules())]
    assert reference.training
    assert not candidate[1].training
    assert reference[4].weight.requires_grad
    assert not candidate[4].weight.requires_grad
    assert torch.equal(reference[0].weight.grad, torch.ones_like(reference[0].weight))
    assert all(p.grad is None for p in candidate.parameters())
    assert x.grad is None
    assert x.requires_grad


def test_generators_default_dtype_and_grad_mode_come_back() -> None:
    x = torch.randn(3, 2, 8)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the global generator is what must come back
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        report = lowtide.verify(net(), net(), x)
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert report.ok
    assert {row.kind for row in report.rows} >= {"param_grad", "input_grad"}
    torch.manual_seed(7)  # making the nets drew from torch's generator, verify did not
    assert torch.equal(torch.rand(1), expected[0])
    assert random.random() == expected[1]
    assert np.random.rand() == expected[2]  # noqa: NPY002
    assert torch.get_default_dtype() == torch.float32


def test_torch_generator_is_where_it_was() -> None:
    reference, candidate, x = net(), net(), torch.randn(3, 2, 8)
    state = torch.get_rng_state()
    lowtide.verify(reference, candidate, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_arguments_give_the_same_report() -> None:
    torch.manual_seed(0)
    reference, candidate, x = net(), net(), torch.randn(3, 2, 8)
    assert lowtide.verify(reference, candidate, x).to_json() == lowtide.verify(reference, candidate, x).to_json()


def test_a_module_can_be_verified_against_itself() -> None:
    model = net()
    assert lowtide.verify(model, model, torch.randn(3, 2, 8)).ok


def test_submodules_in_eval_mode_stay_so_and_an_eval_module_is_trained() -> None:
    torch.manual_seed(0)
    frozen = net()
    frozen[1].eval()  # frozen statistics inside a training network
    report = lowtide.verify(frozen, net(), torch.randn(3, 2, 8))
    assert {f.kind for f in report.failures} == {"output", "buffer"} - {"buffer"}
    assert report.first_module == "1"
    evaluated = net().eval()
    assert lowtide.verify(evaluated, net(), torch.randn(3, 2, 8)).ok
