"""What is not offered is refused by name, before any work."""

from __future__ import annotations

import pytest
import torch
from dense_runs import at_level, network, projection

from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.functional import dense_block, stem, transition
from lowtide.models import DenseNet, densenet121, densenet_bc
from lowtide.nn import DenseBlock, DenseLayer, Transition


@pytest.mark.parametrize("level", ["pointwise", "layer", "block"])
@pytest.mark.parametrize("small_inputs", [True, False])
def test_double_backward_is_refused(level, small_inputs):
    model = at_level(network(small_inputs=small_inputs), level)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    y = projection(model(x), 0)
    with pytest.raises(UnsupportedError, match='create_graph=True; double backward needs recompute="none"'):
        torch.autograd.grad(y, x, create_graph=True)


def test_double_backward_at_none():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(projection(at_level(network(), "none")(x), 0), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad.norm() > 0


CALLS = {
    "level": (lambda: DenseNet(recompute="leyer"), "none, pointwise, layer, block, got 'leyer'"),
    "level of a live model": (lambda: network().set_recompute("all"), "got 'all'"),
    "level of a function": (lambda: dense_block(torch.ones(1, 1, 1), [], recompute="x"), "got 'x'"),
    "level of a transition": (lambda: transition(torch.ones(1), None, recompute="x"), "got 'x'"),
    "level of a stem": (lambda: stem(torch.ones(1), None, recompute="x"), "got 'x'"),
    "axes": (lambda: DenseNet(spatial_dims=4), "spatial_dims to be 1, 2 or 3, got 4"),
    "growth": (lambda: DenseNet(growth_rate=0), "growth_rate to be an integer >= 1, got 0"),
    "layers": (lambda: DenseNet(block_config=(3, 0)), "num_layers to be an integer >= 1, got 0"),
    "blocks": (lambda: DenseNet(block_config=()), "at least one block"),
    "compression": (lambda: DenseNet(compression=1.5), r"compression in \(0, 1\], got 1.5"),
    "dropout": (lambda: DenseLayer(4, 2, drop_rate=1.0), r"drop_rate in \[0, 1\), got 1.0"),
    "init": (lambda: DenseNet(init="xavier"), "fan_out, fan_in, got 'xavier'"),
    "bottleneck": (lambda: DenseNet(bn_size=0), "bn_size to be an integer >= 1"),
    "depth": (lambda: densenet_bc(41, 12), "depth = 6n \\+ 4 with n >= 1, got 41; nearest: 40"),
    "depth without bottleneck": (lambda: densenet_bc(41, 12, bn_size=None), "depth = 3n \\+ 4"),
    "transition": (lambda: Transition(4, 0), "num_output_features"),
    "channels": (lambda: network()(torch.ones(2, 1, 8, 8)), r"images \(N, 3, H, W\), got \(2, 1, 8, 8\)"),
    "no batch": (lambda: network()(torch.ones(3, 8, 8)), r"images \(N, 3, H, W\), got \(3, 8, 8\)"),
    "small image": (lambda: densenet121()(torch.ones(2, 3, 28, 64)), "at least 29 pixels along each axis"),
    "dtype": (lambda: network()(torch.ones(2, 3, 8, 8)), None),
    "block dtype": (lambda: DenseBlock(2, 3, 2, 4)(torch.ones(2, 3, 8, 8).double()), "dtype torch.float32, got"),
    "block channels": (lambda: DenseBlock(2, 3, 2, 4)(torch.ones(2, 4, 8, 8)), "3 channels, got a map"),
    "one value": (lambda: DenseBlock(2, 3, 2, 4)(torch.ones(1, 3, 1, 1)), "more than 1 value per channel"),
}


@pytest.mark.parametrize("call", CALLS)
def test_clear_refusal(call):
    make, message = CALLS[call]
    with pytest.raises(ArgumentError if message else RuntimeError, match=message) as error:
        make()
    assert "\n" not in str(error.value) or message is None


def test_the_smallest_images_work():
    for model in (network(small_inputs=False), network(), network(spatial_dims=1)):
        size = model.minimum_size
        axes = [size] * model.spatial_dims
        assert model(torch.randn(2, 3, *axes, dtype=torch.float64)).isfinite().all()
        with pytest.raises(ArgumentError, match=f"at least {size} pixels"):
            model(torch.randn(2, 3, *(a - 1 for a in axes), dtype=torch.float64))
