"""A converted network is the network that it was: `verify` against an untouched copy, at each level."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import ANY_NETWORKS, BLOCK_NETWORKS, torchvision_densenet

import lowtide
from lowtide.levels import LEVELS, Level

# what each network must yield: its blocks, and those transitions that end in an average pool of 2
CONVERTED = {
    "torchvision": 7,
    "torchvision-dropout": 7,
    "torchvision-checkpoint": 7,
    "timm": 5,
    "monai-1d": 3,
    "monai-2d-dropout": 3,
    "monai-3d": 3,
    "old-style": 3,
    "fc": 3,
}


@pytest.mark.parametrize("name", BLOCK_NETWORKS)
def test_blocks(name: str) -> None:
    torch.manual_seed(11)
    network, x = BLOCK_NETWORKS[name]()
    original = copy.deepcopy(network)
    if name == "torchvision-checkpoint":  # its checkpoints move running statistics twice, which is not to be copied
        original = torchvision_densenet()[0]
        original.load_state_dict(network.state_dict())
    report = lowtide.convert(network, recompute="pointwise")
    assert (len(report.converted), report.skipped) == (CONVERTED[name], ())
    for level in ("pointwise", "layer", "block"):
        network.set_recompute(level)
        lowtide.verify(original, network, x, steps=2).raise_if_failed()


@pytest.mark.parametrize("name", ANY_NETWORKS)
def test_everything(name: str) -> None:
    torch.manual_seed(11)
    network, x = ANY_NETWORKS[name]()
    original = copy.deepcopy(network)
    report = lowtide.convert(network, recompute="pointwise", scope="all")
    assert report.converted
    lowtide.verify(original, network, x, steps=2).raise_if_failed()


def test_every_image_model_of_torchvision_is_found() -> None:
    from torchvision import models

    for name, layers in (("densenet121", 58), ("densenet161", 78), ("densenet169", 82), ("densenet201", 98)):
        with torch.device("meta"):
            network = models.get_model(name, weights=None)
        report = lowtide.convert(network)
        assert report.skipped == ()
        counts = [int(kind.split()[3]) for kind in report.kinds.values() if kind.startswith("dense block")]
        assert (sum(counts), len(counts)) == (layers, 4)
        assert [kind for kind in report.kinds.values() if kind == "transition"] == ["transition"] * 3


@pytest.mark.parametrize("name", ["torchvision-dropout", "monai-2d-dropout"])
def test_the_level_changes_between_the_steps_of_one_run(name: str) -> None:
    torch.manual_seed(3)
    network, x = BLOCK_NETWORKS[name]()
    network, x = network.double(), x.double()
    original = copy.deepcopy(network)
    lowtide.convert(network)
    levels: tuple[Level, ...] = (*LEVELS, "pointwise", "none")
    curves = []
    for model in (original, network):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(7)
        losses = []
        for level in levels:
            if model is network:
                network.set_recompute(level)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-10)
    assert max(curves[0]) > 1.01 * min(curves[0]), "the curve is flat, and would be equal whatever the gradients"
