"""The meter leaves gradients, buffers, modes and random numbers as they were, and runs fn as often as it says."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.measure import Measurement, measure


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_fn_runs_once_per_repeat(repeats: int) -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x.exp()

    m = measure(fn, torch.randn(3, requires_grad=True), repeats=repeats)
    assert len(calls) == m.repeats == repeats
    assert len(m.timing.times) == max(1, repeats - 1)
    assert m.timed_with_instruments == (repeats == 1)


def test_module_state_is_put_back() -> None:
    net = small_net()
    x = torch.randn(2, 3, 8, 8)
    net(x).square().sum().backward()  # buffers that moved, gradients that exist
    net[1].eval()
    before, modes = snapshot(net), [m.training for m in net.modules()]
    grads = [(p.grad, p.grad.clone()) for p in net.parameters() if p.grad is not None]
    assert len(grads) == 4
    measure(net, x, repeats=3, operators=True)
    assert_same_state(net, before)
    assert [m.training for m in net.modules()] == modes
    for p, (grad, value) in zip(net.parameters(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)


def test_modules_reached_in_any_way_are_put_back() -> None:
    net = small_net()
    holder = {"deep": [net]}
    before = snapshot(net)

    def own_backward(x: Tensor) -> None:
        inner = holder["deep"][0]
        inner.train()
        inner(x).square().sum().backward()
        inner.eval()

    for fn in (own_backward, partial(own_backward), net.forward, lambda x: nn.Sequential(net)(x)):
        measure(fn, torch.randn(2, 3, 8, 8), repeats=2)
        assert_same_state(net, before)
        assert all(p.grad is None for p in net.parameters())
        assert all(m.training for m in net.modules())


def test_existing_gradients_survive_a_backward_inside_fn() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 7.0)
    grad = weight.grad

    def accumulate() -> None:
        (weight * 2).sum().backward()

    measure(accumulate, repeats=3)
    assert weight.grad is grad
    assert torch.equal(grad, torch.full((3,), 7.0))


def test_gradients_of_inputs_and_closure_tensors_are_put_back() -> None:
    x, hidden = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    x.grad = torch.ones(3)
    measure(lambda t: t * hidden, x, repeats=2)
    assert torch.equal(x.grad, torch.ones(3))
    assert hidden.grad is None


def test_random_state_is_the_same_in_every_repeat_and_afterwards() -> None:
    seen: list[float] = []

    def fn() -> Tensor:
        numbers = torch.rand(4)
        seen.append(float(numbers[0]))
        return numbers

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    python_state = random.getstate()
    measure(fn, repeats=4)
    assert seen == [float(expected[0])] * 4
    assert torch.equal(torch.rand(4), expected)
    assert random.getstate() == python_state


def test_autocast_and_grad_mode_are_those_of_the_caller() -> None:
    dtypes: list[torch.dtype] = []
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        y = linear(x)
        dtypes.append(y.dtype)
        return y

    with torch.autocast("cpu", torch.bfloat16):
        measure(fn, torch.randn(2, 4), repeats=2)
    assert dtypes == [torch.bfloat16] * 2
    with torch.no_grad():
        assert measure(fn, torch.randn(2, 4), repeats=1).backward == "none"
        assert not torch.is_grad_enabled()


def test_module_calls_are_as_before_even_after_an_error() -> None:
    plain_call = nn.Module.__call__
    net = small_net()
    before = snapshot(net)

    def fails(x: Tensor) -> Tensor:
        net(x)
        raise ValueError("the candidate's own error")

    with pytest.raises(ValueError, match="the candidate's own error"):
        measure(fails, torch.randn(2, 3, 8, 8))
    assert nn.Module.__call__ is plain_call
    assert_same_state(net, before)
    assert measure(net, torch.randn(2, 3, 8, 8), repeats=1).saved_bytes > 0, "the profiler is free again"


def test_no_module_is_hooked_while_it_runs() -> None:
    """A lean block goes the plain way when somebody hooks it: the meter must not be somebody."""

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self._forward_hooks
            assert not self._forward_pre_hooks
            assert not nn.modules.module._global_forward_hooks
            assert not nn.modules.module._global_forward_pre_hooks
            return x.exp()

    assert measure(Looks(), torch.randn(3, requires_grad=True), repeats=1).holders[0].module == "Looks"


def test_modules_made_inside_the_call_are_not_kept_alive() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = nn.Linear(100, 100, bias=False)(x)
        return x

    weight, row = 100 * 100 * 4, 100 * 4
    assert measure(fn, torch.randn(1, 100), repeats=1).peak_bytes == weight + 2 * row


def test_names_at_the_top() -> None:
    assert lowtide.measure is measure
    assert isinstance(lowtide.measure(lambda: None, repeats=1), Measurement)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((3,), {}, "measure: expected fn to be callable, got int"),
        ((abs,), {"repeats": 0}, "measure: expected repeats to be an integer >= 1, got 0"),
        ((abs,), {"repeats": 2.5}, "measure: expected repeats to be an integer >= 1, got 2.5"),
        ((abs,), {"device": "gpu"}, r"measure\(device=...\): expected a device such as 'cpu' or 'cuda:0', got 'gpu'"),
        ((nn.Linear(1, 1, device="meta"),), {"device": "cpu"}, "expected parameters on cpu, got parameters on meta"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        measure(*arguments, **keywords)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected cpu or cuda, got 'meta'"):
        measure(abs, torch.empty(3, device="meta"))
