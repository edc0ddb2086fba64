"""Running statistics move once per forward; dropout leaves the generator where plain leaves it."""

from __future__ import annotations

import pytest
import torch
from dense_runs import LEAN_LEVELS, assert_same, at_level, network, randomise, run
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowtide.functional import dense_block
from lowtide.nn import DenseBlock
from lowtide.parts import BatchNorm, Convolution, DenseLayer

X = (3, 3, 8, 8)


def image():
    return torch.randn(X, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def norms(model):
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def buffers(model):
    return {f"buffer {name}": value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_one_forward_without_backward(level, grad):
    model = network()
    plain, lean = at_level(model, "none").train(), at_level(model, level).train()
    with torch.set_grad_enabled(grad):
        plain(image())
        lean(image())
    expected = buffers(plain)
    assert any(not torch.equal(value, buffers(model)[name]) for name, value in expected.items())
    assert {int(norm.num_batches_tracked) for norm in norms(lean)} == {1}
    ours = buffers(lean)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, 0.001, 1.0, None])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_momentum(level, momentum):
    model = network(drop_rate=0.1)
    for norm in norms(model):
        norm.momentum = momentum
    lean = at_level(model, level)
    assert_same(run(lean, image(), 3), run(at_level(model, "none"), image(), 3))
    assert {norm.momentum for norm in norms(lean)} == {momentum}
    assert {int(norm.num_batches_tracked) for norm in norms(lean)} == {3}


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_untracked_statistics(level):
    model = network()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.BatchNorm2d(child.num_features, track_running_stats=False).double())
    randomise(model)
    seen = run(at_level(model, level), image(), 2)
    assert not [name for name in seen if name.startswith("buffer")]
    assert_same(seen, run(at_level(model, "none"), image(), 2))


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("which", ["norm1", "norm2", "every second", "all"])
def test_norms_without_affine_and_frozen_ones(level, which):
    """Some norms in eval mode inside a network in training, some without gamma and beta."""
    model = network()
    blocks = [norm for name, norm in model.named_modules() if isinstance(norm, _BatchNorm)]
    chosen = [m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and n.endswith(which)]
    chosen = {"every second": blocks[::2], "all": blocks}.get(which, chosen)
    assert chosen
    chosen[0].affine = False
    chosen[0].weight = chosen[0].bias = None

    def frozen(level):
        net = at_level(model, level)
        train = net.train

        def train_but_frozen(mode=True):
            train(mode)
            names = {name for name, module in model.named_modules() if module in chosen}
            for name, module in net.named_modules():
                if name in names:
                    module.eval()
            return net

        net.train = train_but_frozen
        return net

    assert_same(run(frozen(level), image(), 2), run(frozen("none"), image(), 2))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_dropout(level, channels_last):
    model = network(drop_rate=0.2)
    x = image().contiguous(memory_format=torch.channels_last) if channels_last else image()
    plain = run(at_level(model, "none"), x, 3)
    assert not torch.equal(plain["random state"], torch.manual_seed(7).get_state())
    assert_same(run(at_level(model, level), x, 3), plain)


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_dropout_of_whole_channels(level):
    """As `nn.Dropout2d` does: one number per image and channel."""
    torch.manual_seed(0)
    block = randomise(DenseBlock(3, 5, 2, 4).double())
    x = torch.randn(4, 5, 6, 6, dtype=torch.float64)

    def described(layer):
        norm = lambda m: BatchNorm(m.weight, m.bias, None, None)  # noqa: E731
        convs = Convolution(layer.conv1.weight), Convolution(layer.conv2.weight)
        return DenseLayer(norm(layer.norm1), convs[0], norm(layer.norm2), convs[1], 0.5, drop_channels=True)

    def gradients(how):
        torch.manual_seed(11)
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        if how == "modules":
            features = leaf
            for layer in block:
                new = nn.functional.dropout2d(layer(features), 0.5, True)
                features = torch.cat([features, new], 1)
        else:
            features = dense_block(leaf, [described(layer) for layer in block], recompute=how)
        (features * torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).double()).sum().backward()
        named = {f"grad {name}": p.grad.clone() for name, p in block.named_parameters()}
        return {"output": features.detach(), "grad x": leaf.grad, **named, "random state": torch.get_rng_state()}

    expected = gradients("modules")
    assert (expected["output"][:, 5:].flatten(2).abs().sum(2) == 0).any()
    assert_same(gradients("none"), expected)
    assert_same(gradients(level), expected)
