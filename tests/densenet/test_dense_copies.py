"""Copies, pickles and replicas use their own layers; checkpoints of other spellings load strictly."""

from __future__ import annotations

import copy
import pickle

import monai.networks.nets as monai_nets
import pytest
import torch
import torchvision
from dense_runs import LEAN_LEVELS, assert_same, at_level, network, randomise, run

from lowtide.models import DenseNet, densenet121


def image(*shape):
    return torch.randn(shape or (3, 3, 8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_its_own_network(level, how):
    model = at_level(network(drop_rate=0.1), level)
    run(model, image())  # whatever a forward might leave behind
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = run(copy.deepcopy(at_level(model, "none")), image(), 2)
    assert_same(run(twin, image(), 2), expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_replicas_use_their_own_layers(level):
    """`_replicate_for_data_parallel` is what DataParallel calls per device; parameters are then set as attributes."""

    def replicate(module):
        replica = module._replicate_for_data_parallel()
        replica._former_parameters = {}
        for name, child in module._modules.items():
            replica._modules[name] = replicate(child)
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                own = (parameter.detach() * 1.25).requires_grad_()
                setattr(replica, name, own)
                replica._former_parameters[name] = own
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else buffer.clone()
        return replica

    def outcome(level):
        model = at_level(network(), level).train()
        replica = replicate(model)
        y = replica(image())
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        weight = replica.features.denseblock1.denselayer2.conv1.weight
        norm = replica.features.denseblock2.denselayer1.norm2
        return {"output": y.detach(), "grad conv": weight.grad, "grad norm": norm.weight.grad}

    assert_same(outcome(level), outcome("none"))


def _equal_state(model, state):
    ours = model.state_dict()
    assert ours
    assert set(ours) == set(state)
    assert all(torch.equal(ours[name], state[name]) for name in state)


@pytest.mark.parametrize("spelling", ["norm1", "norm.1"])
def test_torchvision_weights(spelling):
    theirs = randomise(torchvision.models.densenet121(num_classes=7))
    state = theirs.state_dict()
    given = state
    if spelling == "norm.1":  # the files of the first releases: no counters, no version
        given = {
            name.replace("norm1.", "norm.1.").replace("norm2.", "norm.2.").replace("conv1.", "conv.1.")
            .replace("conv2.", "conv.2."): value
            for name, value in state.items()
            if not name.endswith("num_batches_tracked")
        }  # fmt: skip
        assert "features.denseblock1.denselayer1.conv.2.weight" in given
    ours = densenet121(num_classes=7)
    ours.load_state_dict(given, strict=True)
    _equal_state(ours, state)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_norm_final():
    model = network()
    state = model.state_dict()
    renamed = {name.replace("norm5", "norm_final"): value for name, value in state.items()}
    assert "features.norm_final.weight" in renamed
    twin = network(seed=1)
    twin.load_state_dict(renamed, strict=True)
    _equal_state(twin, state)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_monai_weights(dims):
    torch.manual_seed(0)
    settings = {"init_features": 8, "growth_rate": 4, "block_config": (2, 3), "bn_size": 2}
    theirs = randomise(monai_nets.DenseNet(dims, 2, 5, **settings)).double()
    ours = DenseNet(4, (2, 3), 0.5, 8, 2, num_classes=5, small_inputs=False, in_channels=2, spatial_dims=dims).double()
    assert any(".layers.norm1." in name for name in theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = image(2, 2, *[34] * dims)
    assert_same(_values(run(ours, x, 2)), _values(run(theirs, x, 2)))


def _values(seen):
    """Without names, which differ: outputs, and gradients in the order of the parameters."""
    return {f"{name.split()[0]} {i}": value for i, (name, value) in enumerate(seen.items())}


def test_a_checkpoint_of_another_network_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch"):
        network().load_state_dict(network(growth_rate=5).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        network().load_state_dict(network(bn_size=None).state_dict())
