"""Hooks on the model, its features, blocks and transitions see plain's values; inside a block the plain way runs."""

from __future__ import annotations

import pytest
import torch
from dense_runs import LEAN_LEVELS, assert_same, at_level, network, projection, run
from torch import nn

from lowtide.nn import DenseBlock, Transition

PLACES = ["features", "features.denseblock1", "features.denseblock2", "features.transition1", "features.norm5", ""]


def image():
    return torch.randn((3, 3, 8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _watched(model, level, places, kind):
    """One step with hooks; what each hook saw, and the gradients."""
    net = at_level(model, level).train()
    seen = {}

    def keep(name, value):
        value = value[0] if isinstance(value, tuple) else value
        seen[f"{name} #{len(seen)}"] = value.detach().clone()

    for place in places:
        module = net.get_submodule(place)
        if kind == "forward":
            module.register_forward_hook(lambda m, x, y, p=place: (keep(f"in {p}", x), keep(f"out {p}", y))[0])
        elif kind == "pre":
            module.register_forward_pre_hook(lambda m, x, p=place: keep(f"in {p}", x))
        elif kind == "backward":
            module.register_full_backward_hook(
                lambda m, gx, gy, p=place: (keep(f"gin {p}", gx), keep(f"gout {p}", gy))[0]
            )
        else:
            module.register_forward_hook(
                lambda m, x, y, p=place: y.register_hook(lambda g, p=p: keep(f"tensor {p}", g)) and None
            )
    leaf = image().requires_grad_()
    leaf.register_hook(lambda g: keep("image", g))
    projection(net(leaf), 0).backward()
    seen |= {f"grad {name}": p.grad for name, p in net.named_parameters()}
    return seen


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "tensor"])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_every_place_at_once(level, kind):
    model = network()
    expected = _watched(model, "none", PLACES, kind)
    assert len(expected) > len(PLACES) + len(list(model.parameters()))
    assert_same(_watched(model, level, PLACES, kind), expected)


@pytest.mark.parametrize("place", PLACES)
def test_one_place_at_a_time(place):
    model = network()
    for kind in ("forward", "backward"):
        assert_same(_watched(model, "layer", [place], kind), _watched(model, "none", [place], kind))


def test_a_hook_that_changes_the_output():
    def changed(level):
        net = at_level(network(), level)
        net.features.denseblock1.register_forward_hook(lambda m, x, y: y * 1.5)
        return run(net, image())

    assert_same(changed("layer"), changed("none"))


def test_gradient_of_the_last_block_is_left_alone():
    """A hook on the block's output and the node below share that gradient: the node works on its own copy."""
    net = at_level(network(), "pointwise").train()
    held = []
    net.features.denseblock2.register_forward_hook(
        lambda m, x, y: y.register_hook(lambda g: held.append((g, g.clone()))) and None
    )
    projection(net(image()), 0).backward()
    ((gradient, copy),) = held
    assert torch.equal(gradient, copy)


class Viewing(nn.Module):
    """Fails where the memory order is not that of ordinary autograd for a contiguous image."""

    def forward(self, x):
        return x.view(*x.shape[:2], -1).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("where", ["transition1", "denseblock2", "denseblock2.denselayer1.conv1", "transition1.0"])
@pytest.mark.filterwarnings("ignore:DenseBlock runs in ordinary autograd")
def test_who_looks_sees_the_memory_order_of_plain(where):
    """Maps between nodes may be channels_last, but not where a hook or a module of the user's own sees them."""
    strides = []
    for level in ("none", *LEAN_LEVELS):
        net = at_level(network(), level).train()
        if where == "transition1.0":
            net.features.transition1 = nn.Sequential(Viewing(), net.features.transition1)
        else:
            net.features.get_submodule(where).register_forward_pre_hook(lambda m, x: strides.append(x[0].stride()))
        projection(net(image()), 0).backward()
    assert len(strides) == (0 if where == "transition1.0" else 4)
    assert len(set(strides)) <= 1


def test_who_does_not_look():
    """The order is free only where it cannot be seen: otherwise a step would be slower for nothing, or wrong."""
    for dims, free in ((1, False), (2, True), (3, True)):
        x = torch.zeros(1, 3, *[32] * dims)
        for small_inputs in (True, False):
            assert network(spatial_dims=dims, small_inputs=small_inputs).features._may_reorder(x) is free
    dropping, normed, changed = network(drop_rate=0.1), network(), network()
    normed.features.norm5 = nn.GroupNorm(1, normed.features.norm5.num_features)
    changed.features.denseblock2.denselayer1.forward = lambda features: features
    assert not any(net.features._may_reorder(image()) for net in (dropping, normed, changed))


def _grad_cam(net, x):
    maps = {}
    block = net.features.denseblock2
    forward = block.register_forward_hook(lambda m, i, o: maps.update(value=o))
    backward = block.register_full_backward_hook(lambda m, gi, go: maps.update(grad=go[0]))
    net.eval()(x)[:, 2].sum().backward()
    forward.remove()
    backward.remove()
    weights = maps["grad"].mean((2, 3), keepdim=True)
    return {"grad cam": torch.relu((weights * maps["value"]).sum(1)).detach()}


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_grad_cam(level):
    model = network()
    assert_same(_grad_cam(at_level(model, level), image()), _grad_cam(at_level(model, "none"), image()))


def test_hook_inside_a_block_runs_the_plain_way_with_one_warning():
    model = network()
    net = at_level(model, "layer")
    calls = []
    net.features.denseblock1.denselayer2.conv1.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(
        UserWarning, match=r"DenseBlock runs in ordinary autograd.*denselayer2\.conv1 has a hook"
    ) as seen:
        ours = run(net, image(), 3)
    assert len(seen) == 1
    assert len(calls) == 4
    assert_same(ours, run(at_level(model, "none"), image(), 3))


REPLACED = {
    "norm": (lambda layer: setattr(layer, "norm1", nn.GroupNorm(2, layer.norm1.num_features).double()), "GroupNorm"),
    "instance norm": (lambda layer: setattr(layer, "norm2", nn.InstanceNorm2d(16, affine=True).double()), "Instance"),
    "activation": (lambda layer: setattr(layer, "relu2", nn.SiLU()), "SiLU"),
    "dilated": (lambda layer: setattr(layer, "conv2", nn.Conv2d(16, 4, 3, padding=2, dilation=2).double()), "3x"),
    "extra child": (lambda layer: layer.add_module("extra", nn.Identity()), "other children"),
    "own forward": (lambda layer: setattr(layer, "forward", lambda x: layer.conv2.weight.mean() * x[0][:, :4]), "own"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_child_runs_the_plain_way_with_one_warning(what):
    change, reason = REPLACED[what]

    def changed(level):
        torch.manual_seed(5)
        net = at_level(network(), level)
        change(net.features.denseblock1.denselayer1)
        return net

    leaf = image()
    expected = changed("none").eval()(leaf)
    assert not torch.allclose(expected, network().eval()(leaf)) or what == "extra child"
    with pytest.warns(UserWarning, match=reason) as seen:
        torch.testing.assert_close(changed("layer").eval()(leaf), expected)
    assert len(seen) == 1


def test_global_hook_runs_the_plain_way():
    names = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, x, y: names.append(type(m).__name__))
    try:
        with pytest.warns(UserWarning, match="global"):
            at_level(network(), "layer")(image())
    finally:
        handle.remove()
    assert "DenseLayer" in names


def _own_network(level):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        DenseBlock(3, 6, 2, 4, recompute=level),
        Transition(18, 7, recompute=level),
        DenseBlock(2, 7, None, 4, recompute=level),
        nn.Flatten(),
        nn.Linear(15 * 16, 5),
    ).double()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_modules_in_a_network_of_the_users_own(level, channels_last):
    order = torch.channels_last if channels_last else torch.contiguous_format
    x = image().contiguous(memory_format=order)
    assert_same(run(_own_network(level), x, 3), run(_own_network("none"), x, 3))
    for part in (1, 2):
        plain, lean = _own_network("none")[: part + 1](x), _own_network(level)[: part + 1](x)
        assert lean.stride() == plain.stride(), "the output's memory order is not plain's"
        assert lean.is_contiguous(memory_format=order)
