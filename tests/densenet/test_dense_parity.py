"""float64: every output, gradient, buffer and eval output of whole networks within 1e-9 of the plain network."""

from __future__ import annotations

import pytest
import torch
import torchvision
from dense_runs import LEAN_LEVELS, assert_same, at_level, errors, network, projection, randomise, run

from lowtide.models import densenet121, densenet_bc

FORMS = {
    "bottleneck": ({}, (3, 3, 9, 11)),
    "no bottleneck": ({"bn_size": None}, (3, 3, 8, 9)),
    "growth 1, one layer": (
        {"growth_rate": 1, "block_config": (1,), "num_init_features": 1, "in_channels": 1},
        (2, 1, 6, 5),
    ),
    "no compression": ({"compression": 1.0, "block_config": (1, 1, 2)}, (2, 3, 8, 8)),
    "imagenet stem": ({"small_inputs": False}, (2, 3, 33, 47)),
    "one axis": ({"spatial_dims": 1}, (3, 3, 29)),
    "one axis, imagenet stem": ({"spatial_dims": 1, "small_inputs": False}, (3, 3, 65)),
    "three axes": ({"spatial_dims": 3}, (2, 3, 6, 7, 5)),
    "three axes, imagenet stem": ({"spatial_dims": 3, "small_inputs": False}, (2, 3, 33, 17, 21)),
}


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_small_networks(form, level):
    keywords, shape = FORMS[form]
    model = network(**keywords)
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(run(at_level(model, level), x, 3), run(at_level(model, "none"), x, 3))


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("form", ["bottleneck", "no bottleneck", "imagenet stem", "three axes"])
def test_channels_last(form, level):
    keywords, shape = FORMS[form]
    order = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    model = network(**keywords)
    x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=order)
    assert_same(run(at_level(model, level), x, 2), run(at_level(model, "none"), x, 2))


@pytest.mark.parametrize("shape", [(2, 3, 29, 29), (1, 3, 33, 47), (1, 3, 225, 161)])
def test_odd_sizes(shape):
    model = network(small_inputs=min(shape[2:]) < 100)
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(run(at_level(model, "layer"), x, 1), run(at_level(model, "none"), x, 1))


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_eval_mode_in_training(level):
    model = network(small_inputs=False)
    x = torch.randn(2, 3, 33, 35, dtype=torch.float64)
    assert_same(run(at_level(model, level), x, 2, train=False), run(at_level(model, "none"), x, 2, train=False))


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_bc40(level):
    torch.manual_seed(1)
    model = randomise(densenet_bc(40, 12).double())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_same(run(at_level(model, level), x, 3), run(at_level(model, "none"), x, 3))


def test_bc100_every_parameter():
    torch.manual_seed(2)
    model = randomise(densenet_bc(100, 12).double())
    assert sum(p.numel() for p in model.parameters()) == 769_162
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    plain = run(at_level(model, "none"), x)
    assert len([name for name in plain if name.startswith("grad")]) == 1 + len(list(model.parameters()))
    for level in LEAN_LEVELS:
        assert_same(run(at_level(model, level), x), plain)


@pytest.fixture(scope="module")
def torchvision_run():
    torch.manual_seed(3)
    model = randomise(torchvision.models.densenet121(num_classes=10).double())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, x, run(model, x, 3)


@pytest.mark.parametrize("level", ["none", *LEAN_LEVELS])
def test_densenet121_is_torchvisions(torchvision_run, level):
    state, x, expected = torchvision_run
    model = densenet121(num_classes=10, recompute=level).double()
    model.load_state_dict(state, strict=True)
    assert_same(run(model, x, 3), expected)


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_level_changed_during_a_run(level):
    model = network()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)

    def losses(levels):
        net = at_level(model, "none").train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        values = []
        for step, now in enumerate(levels):
            net.set_recompute(now)
            loss = projection(net(x), step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return torch.stack(values)

    expected = losses(["none"] * 6)
    assert expected.std() > 0.1
    torch.testing.assert_close(losses(["none", level, "none", level, level, "none"]), expected, rtol=1e-10, atol=1e-10)


def test_a_graph_can_be_walked_twice():
    model = at_level(network(), "pointwise")
    y = projection(model(torch.randn(2, 3, 8, 8, dtype=torch.float64)), 0)
    first = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(y, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_two_forwards_before_the_backward():
    model = network()
    x = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64)

    def gradients(level):
        net = at_level(model, level).train()
        (projection(net(x[0]), 0) * projection(net(x[1]), 1)).backward()
        return {f"grad {name}": p.grad for name, p in net.named_parameters()}

    expected = gradients("none")
    for level in LEAN_LEVELS:
        assert_same(gradients(level), expected)


def test_the_comparison_sees_one_wrong_tensor():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    seen = run(network(), x)
    for name in seen:
        wrong = dict(seen)
        wrong[name] = seen[name] + 1 if not seen[name].is_floating_point() else seen[name] * (1 + 1e-6) + 1e-6
        assert max(errors(wrong, seen).values()) > 1e-9, name
