"""Networks of other packages, as they are and converted by `lowtide.convert`: one SGD training step.

Cases: torchvision's resnet50 (batch 8, 224x224) and MONAI's UNet in 3-D (batch 2, 64^3), all norms and activations
(scope "all"); torchvision's densenet121 (batch 16, 224x224), MONAI's DenseNet121 in 3-D (batch 1, 96^3), blocks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Contender, Figure, run_case
from torch import Tensor, nn

import lowtide
from densenet import image, prepared, training_step


def converted(model: nn.Module, level: Any, scope: Any) -> nn.Module:
    if level != "none":
        lowtide.convert(model, recompute=level, scope=scope)
    return model


def resnet50(level: str = "none", *, batch: int = 8, size: int = 224, channels_last: bool = False):
    from torchvision.models import resnet50 as build

    torch.manual_seed(0)
    model = converted(prepared(build(), channels_last), level, "all")
    return training_step(model, image(batch, 3, size, size, channels_last=channels_last), 1000)


def unet(level: str = "none", *, residual_units: int = 2, batch: int = 2, size: int = 64):
    """Five stages of 16 to 256 channels; batch norm, PReLU."""
    from monai.networks.nets.unet import UNet

    torch.manual_seed(0)
    model = UNet(3, 1, 2, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=residual_units, norm="batch")
    model = converted(prepared(model, False), level, "all")
    return segmentation_step(model, image(batch, 1, size, size, size))


def segmentation_step(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """One step of SGD with momentum; a class per position."""
    target = torch.randint(2, (x.shape[0], *x.shape[2:]), generator=torch.Generator().manual_seed(0)).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def densenet121(level: str = "none", *, batch: int = 16, size: int = 224, channels_last: bool = False):
    from torchvision.models import densenet121 as build

    torch.manual_seed(0)
    model = converted(prepared(build(), channels_last), level, "blocks")
    return training_step(model, image(batch, 3, size, size, channels_last=channels_last), 1000)


def densenet121_3d(level: str = "none", *, batch: int = 1, size: int = 96):
    from monai.networks.nets.densenet import DenseNet121

    torch.manual_seed(0)
    model = DenseNet121(spatial_dims=3, in_channels=1, out_channels=2)
    model = converted(prepared(model, False), level, "blocks")
    return training_step(model, image(batch, 1, size, size, size), 2)


def contenders(builder: str, package: str, levels: tuple[str, ...], **kwargs: Any) -> list[Contender]:
    plain = Contender("original", f"convert:{builder}", kwargs, baseline=True, needs=package)
    return [
        plain,
        *(
            Contender(f"converted, {level}", plain.builder, {**kwargs, "level": level}, needs=package)
            for level in levels
        ),
    ]


# at scope "all" every lean level does the same outside dense blocks
CASES: dict[str, tuple[str, list[Contender]]] = {
    "resnet50": ("resnet50, batch 8, 224x224, scope all", contenders("resnet50", "torchvision", ("pointwise",))),
    "unet": (
        "MONAI UNet 3-D, batch 2, 64^3, scope all",
        contenders("unet", "monai", ("pointwise",)),
    ),
    "unet-simple": (
        "MONAI UNet 3-D without residual units, batch 2, 64^3, scope all",
        contenders("unet", "monai", ("pointwise",), residual_units=0),
    ),
    "densenet121": (
        "torchvision densenet121, batch 16, 224x224",
        contenders("densenet121", "torchvision", ("pointwise", "layer", "block")),
    ),
    "3d": (
        "MONAI DenseNet121 3-D, batch 1, 96^3",
        contenders("densenet121_3d", "monai", ("pointwise", "layer", "block")),
    ),
}


def run(*, quick: bool = False, only: str = "") -> list[Figure]:
    figures: list[Figure] = []
    for name, (case, contending) in CASES.items():
        if only in ("", name):
            figures += run_case(case, contending, repeats=3 if quick else 9)
    return figures
