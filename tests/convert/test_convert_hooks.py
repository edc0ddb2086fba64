"""Hooks on a converted network see what the original's would; in-place activations no longer break them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from networks import monai_unet, resnet, torchvision_densenet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide


def out_of_place(model: nn.Module) -> nn.Module:
    """The original with every in-place ReLU out of place, where it can be hooked."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


class OutOfPlaceTail(nn.Module):
    """torchvision's DenseNet.forward without its in-place ReLU."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.features, self.classifier = model.features, model.classifier

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.features(x))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(y, (1, 1)), 1))


def seen_by_hooks(model: nn.Module, paths: list[str], x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda m, args, out, path=path: seen.__setitem__(f"{path} out", out.detach() * 1))
        module.register_full_backward_hook(
            lambda m, grad_in, grad_out, path=path: seen.__setitem__(f"{path} grad", grad_out[0].clone())
        )
    model(x).square().sum().backward()
    return seen


@pytest.mark.parametrize("scope", ["blocks", "all"])
def test_backward_hooks_on_features_blocks_and_norms(scope: Any) -> None:
    torch.manual_seed(0)
    model, x = torchvision_densenet()
    model, x = model.double(), x.double().requires_grad_()
    paths = ["features", "features.denseblock2", "features.transition1", "features.norm0", "features.norm5"]
    plain = OutOfPlaceTail(out_of_place(copy.deepcopy(model)))
    lowtide.convert(model, recompute="layer", scope=scope)
    expected, found = seen_by_hooks(plain, paths, x), seen_by_hooks(model, paths, x)
    assert set(found) == set(expected) == {f"{path} {what}" for path in paths for what in ("out", "grad")}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_the_original_could_not_be_hooked_there() -> None:
    model, x = torchvision_densenet()
    with pytest.raises(RuntimeError, match="modified inplace"):
        seen_by_hooks(model, ["features"], x)


def test_hooks_between_norm_activation_and_convolution() -> None:
    torch.manual_seed(0)
    model, x = resnet()
    model, x = out_of_place(model).double(), x.double()
    paths = ["bn1", "layer1.0.bn1", "layer1.0.conv2", "layer2.1.bn2", "layer3.0"]
    plain = copy.deepcopy(model)
    lowtide.convert(model, scope="all")
    expected, found = seen_by_hooks(plain, paths, x), seen_by_hooks(model, paths, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_grad_cam_on_the_last_block() -> None:
    torch.manual_seed(0)
    model, x = torchvision_densenet()
    model, x = model.double().eval(), x.double()
    maps = []
    for network in (copy.deepcopy(model), model):
        if network is model:
            lowtide.convert(model, recompute="block")
        kept: list[Tensor] = []
        network.features.denseblock4.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        score = network(x)[:, 1].sum()
        (grad,) = torch.autograd.grad(score, kept[0])
        maps.append(torch.relu((kept[0] * grad.mean((2, 3), keepdim=True)).sum(1)).detach())
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-9, atol=1e-12)
    assert maps[0].any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_a_network_converted_as_a_whole(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        """One checkpoint around a module, and one around calls of functions."""

        def __init__(self) -> None:
            super().__init__()
            self.net = monai_unet(2)[0]
            self.norm, self.conv = nn.GroupNorm(1, 2), nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.net, x, use_reentrant=reentrant)
            return checkpoint(lambda z: self.conv(F.silu(self.norm(z))), y, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed().double()
    x = torch.randn(1, 1, 16, 16, 16, dtype=torch.float64, requires_grad=True)
    plain = copy.deepcopy(model)
    lowtide.convert(model, scope="all")
    for network in (plain, model):
        network(x).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9, msg=name)
