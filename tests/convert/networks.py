"""Small networks of the kinds that people convert, each with an input."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from monai.networks.nets.densenet import DenseNet as MonaiDenseNet
from monai.networks.nets.unet import UNet
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

SMALL = (2, 3, 2)


def torchvision_densenet(**options: object) -> tuple[nn.Module, Tensor]:
    return models.DenseNet(8, (2, 3, 2, 2), 16, num_classes=5, **options), torch.randn(2, 3, 64, 64)


def timm_densenet() -> tuple[nn.Module, Tensor]:
    network = timm.models.densenet.DenseNet(growth_rate=8, block_config=SMALL, num_classes=5)
    return network, torch.randn(2, 3, 64, 64)


def monai_densenet(dims: int, **options: object) -> tuple[nn.Module, Tensor]:
    network = MonaiDenseNet(dims, 1, 4, init_features=16, growth_rate=8, block_config=(2, 3), **options)
    return network, torch.randn(2, 1, *{1: (64,), 2: (48, 40), 3: (32, 24, 32)}[dims])


class OldLayer(nn.Sequential):
    """The layer of torchvision's first DenseNet, copied into many packages: it returns what it read as well."""

    def __init__(self, channels: int, growth: int, drop_rate: float) -> None:
        super().__init__()
        self.add_module("norm1", nn.BatchNorm2d(channels))
        self.add_module("relu1", nn.ReLU(inplace=True))
        self.add_module("conv1", nn.Conv2d(channels, 4 * growth, 1, bias=False))
        self.add_module("norm2", nn.BatchNorm2d(4 * growth))
        self.add_module("relu2", nn.ReLU(inplace=True))
        self.add_module("conv2", nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        new = super().forward(x)
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return torch.cat([x, new], 1)


def old_densenet(drop_rate: float = 0.2) -> tuple[nn.Module, Tensor]:
    """A medical DenseNet in the old style: one input channel, blocks that are plain `Sequential`s."""
    block1 = nn.Sequential(*(OldLayer(16 + 8 * i, 8, drop_rate) for i in range(3)))
    transition = nn.Sequential(nn.BatchNorm2d(40), nn.ReLU(inplace=True), nn.Conv2d(40, 20, 1), nn.AvgPool2d(2, 2))
    block2 = nn.Sequential(*(OldLayer(20 + 8 * i, 8, drop_rate) for i in range(2)))
    features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), block1, transition, block2, nn.BatchNorm2d(36), nn.ReLU())
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(36, 3)), torch.randn(2, 1, 17, 14)


class UpBlock(nn.Module):
    """FC-DenseNet: layers without bottleneck in a list; on the way up a block returns only what it added."""

    def __init__(self, channels: int, growth: int, count: int, *, only_new: bool) -> None:
        super().__init__()
        self.only_new = only_new
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels + i * growth, growth, 3, padding=1),
                nn.Dropout2d(0.2),
            )
            for i in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        added = []
        for layer in self.layers:
            new = layer(x)
            x = torch.cat([x, new], 1)
            added.append(new)
        return torch.cat(added, 1) if self.only_new else x


class FCDenseNet(nn.Module):
    """One step down, one up, one skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.down = UpBlock(12, 4, 3, only_new=False)
        self.shrink = nn.Sequential(
            nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.Conv2d(24, 24, 1), nn.Dropout2d(0.2), nn.MaxPool2d(2)
        )
        self.bottom = UpBlock(24, 4, 2, only_new=True)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.last = UpBlock(32, 4, 2, only_new=True)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(self.first(x))
        y = self.up(self.bottom(self.shrink(skip)))
        return self.out(self.last(torch.cat([y, skip], 1)))


def fc_densenet() -> tuple[nn.Module, Tensor]:
    return FCDenseNet(), torch.randn(2, 3, 16, 12)


class FunctionalLayer(nn.Module):
    """A layer whose ReLUs are function calls and whose new channels come first."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat([out, x], 1)


def new_first_densenet() -> tuple[nn.Module, Tensor]:
    block = nn.Sequential(*(FunctionalLayer(12 + 6 * i, 6) for i in range(3)))
    network = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), block, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return network, torch.randn(2, 3, 12, 10)


def monai_unet(units: int, **options: object) -> tuple[nn.Module, Tensor]:
    return UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=units, **options), torch.randn(1, 1, 16, 16, 16)


def resnet() -> tuple[nn.Module, Tensor]:
    block = models.resnet.Bottleneck
    return models.ResNet(block, [1, 2, 1, 1], num_classes=5), torch.randn(2, 3, 64, 48)


BLOCK_NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "torchvision": torchvision_densenet,
    "torchvision-dropout": lambda: torchvision_densenet(drop_rate=0.2),
    "torchvision-checkpoint": lambda: torchvision_densenet(memory_efficient=True),
    "timm": timm_densenet,
    "monai-1d": lambda: monai_densenet(1),
    "monai-2d-dropout": lambda: monai_densenet(2, dropout_prob=0.2),
    "monai-3d": lambda: monai_densenet(3),
    "old-style": old_densenet,
    "fc": fc_densenet,
}
# scope "all"
ANY_NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "resnet": resnet,
    "unet": lambda: monai_unet(0),
    "unet-residual": lambda: monai_unet(2),
    "unet-group": lambda: monai_unet(2, norm=("group", {"num_groups": 2}), act="gelu"),
    "monai-2d-instance": lambda: monai_densenet(
        2, norm="instance", act=("leakyrelu", {"inplace": False, "negative_slope": 0.1})
    ),
    "new-first": new_first_densenet,
    "fc": fc_densenet,
}
