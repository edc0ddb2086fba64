"""A conversion changes nothing that can be seen but memory, survives copies and pickles, and can be taken back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from networks import BLOCK_NETWORKS, monai_densenet, resnet, torchvision_densenet
from torch import nn

import lowtide


def fingerprint(model: nn.Module) -> list[Any]:
    """Classes, attributes, parameters and buffers by identity and value, of every module in order."""
    seen: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        seen.append((name, id(module), type(module), tuple(module.__dict__)))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            seen.append((key, id(tensor), None if tensor is None else tensor.detach().clone().flatten().tolist()))
    return seen


def test_the_fingerprint_sees_a_changed_class_attribute_and_value() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = fingerprint(model)
    model[0].note = 1  # type: ignore[assignment]
    assert fingerprint(model) != before
    del model[0].note
    assert fingerprint(model) == before
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    assert fingerprint(model) != before


@pytest.mark.parametrize(("name", "scope"), [("torchvision", "blocks"), ("timm", "all"), ("fc", "all")])
def test_restore_leaves_no_trace(name: str, scope: Any) -> None:
    network, _ = BLOCK_NETWORKS[name]()
    before = fingerprint(network)
    lowtide.convert(network, scope=scope)
    parameters = list(network.parameters())
    assert fingerprint(network) != before
    lowtide.restore(network)
    assert fingerprint(network) == before
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    assert not hasattr(network, "set_recompute")


def test_keys_parameters_and_random_numbers_stay() -> None:
    network, _ = monai_densenet(2)
    keys, parameters = list(network.state_dict()), list(network.parameters())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    lowtide.convert(network, scope="all")
    assert torch.equal(torch.get_rng_state(), state)
    assert list(network.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    assert all(p.grad is None for p in network.parameters())


def test_weights_go_both_ways() -> None:
    plain, converted = torchvision_densenet()[0], torchvision_densenet()[0]
    lowtide.convert(converted)
    converted.load_state_dict(plain.state_dict())
    plain.load_state_dict(converted.state_dict())


@pytest.mark.parametrize("scope", ["blocks", "all"])
def test_copies_run_lean_with_their_own_weights(scope: Any) -> None:
    network, x = monai_densenet(2)
    lowtide.convert(network, recompute="layer", scope=scope)
    expected = kept_bytes(network, x)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert kept_bytes(twin, x) == expected
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        assert not twin(x).any()
        assert network(x).any()
        twin.set_recompute("none")
        lowtide.restore(twin)
        assert type(twin) is type(monai_densenet(2)[0])
    assert kept_bytes(network, x) == expected


def kept_bytes(network: nn.Module, x: torch.Tensor) -> int:
    return lowtide.measure(lambda image: network(image), x, repeats=1).saved_bytes


def test_a_data_parallel_replica_uses_its_own_weights() -> None:
    network, x = torchvision_densenet()
    lowtide.convert(network, scope="all")
    replicas = {}
    for name, module in network.named_modules():
        replicas[name] = module._replicate_for_data_parallel()
    for name, replica in replicas.items():
        for child_name in replica._modules:
            setattr(replica, child_name, replicas[f"{name}.{child_name}" if name else child_name])
        for key, parameter in network.get_submodule(name)._parameters.items():
            setattr(replica, key, None if parameter is None else parameter.detach() * 0)
    network.eval()
    for replica in replicas.values():
        replica.eval()
    assert not replicas[""](x).any()
    assert network(x).any()


def test_one_loss_curve_across_convert_and_restore() -> None:
    torch.manual_seed(2)
    plain, x = torchvision_densenet(drop_rate=0.1)
    plain, x = plain.double(), x.double()
    changing = copy.deepcopy(plain)
    curves = []
    for model in (plain, changing):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(9)
        losses = []
        for step in range(6):
            if model is changing and step == 2:
                lowtide.convert(model, recompute="layer")
            if model is changing and step == 4:
                lowtide.restore(model)
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    assert max(curves[0]) > 1.01 * min(curves[0])


def test_a_converted_model_without_gradients_keeps_nothing() -> None:
    network, x = resnet()
    lowtide.convert(network, scope="all")
    network.eval()
    with torch.no_grad():
        out = network(x)
    assert out.grad_fn is None
    assert kept_bytes(network.requires_grad_(False), x) == 0
