"""Dense networks, one SGD training step: plain, the usual memory savers, and lowtide at each level.

Cases: DenseNet-BC 100 k 12 (batch 64, 32x32), densenet121 (batch 16, 224x224), DenseNet121 in 3-D (batch 1, 96^3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Contender, Figure, run_case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.models import DenseNet, densenet_bc


def training_step(model: nn.Module, x: Tensor, classes: int) -> Callable[[], float]:
    """One step of SGD with Nesterov momentum on a fixed batch; gradients are freed as `zero_grad` does by default."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(classes, (x.shape[0],), generator=generator).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    model.train()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def image(*shape: int, channels_last: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device())
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def prepared(model: nn.Module, channels_last: bool) -> nn.Module:
    model = model.to(device())
    return model.to(memory_format=torch.channels_last) if channels_last else model


class CheckpointedLayer(nn.Module):
    """What the usual `memory_efficient` flags do: concat, norm1, relu1 and conv1 run again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: list[Tensor]) -> Tensor:
        layer = self.layer

        def bottleneck(*maps: Tensor) -> Tensor:
            return layer.conv1(F.relu(layer.norm1(torch.cat(maps, 1))))

        hidden = checkpoint(bottleneck, *features, use_reentrant=False)
        return layer.conv2(F.relu(layer.norm2(hidden)))


class CheckpointedBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedLayer(layer) for layer in block.children())

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def bc100(
    level: str = "none",
    *,
    batch: int = 64,
    depth: int = 100,
    channels_last: bool = False,
    checkpointed: bool = False,
    compiled: bool = False,
):
    torch.manual_seed(0)
    model = densenet_bc(depth, 12, recompute=level)
    if checkpointed:
        for name, child in model.features.named_children():
            if name.startswith("denseblock"):
                setattr(model.features, name, CheckpointedBlock(child))
    model = prepared(model, channels_last)
    run = torch.compile(model) if compiled else model
    return training_step(run, image(batch, 3, 32, 32, channels_last=channels_last), 10)


def densenet121(
    source: str = "lowtide",
    level: str = "none",
    *,
    batch: int = 16,
    size: int = 224,
    channels_last: bool = False,
    memory_efficient: bool = False,
):
    torch.manual_seed(0)
    if source == "torchvision":
        from torchvision.models import densenet121 as build

        model = build(memory_efficient=memory_efficient)
    elif source == "timm":
        import timm

        model = timm.create_model("densenet121", memory_efficient=memory_efficient)
    else:
        from lowtide.models import densenet121 as build

        model = build(recompute=level)
    return training_step(prepared(model, channels_last), image(batch, 3, size, size, channels_last=channels_last), 1000)


def densenet121_3d(source: str = "lowtide", level: str = "none", *, batch: int = 1, size: int = 96):
    torch.manual_seed(0)
    if source == "monai":
        from monai.networks.nets import DenseNet121

        model = DenseNet121(spatial_dims=3, in_channels=1, out_channels=2)
    else:
        model = DenseNet(
            growth_rate=32,
            block_config=(6, 12, 24, 16),
            num_init_features=64,
            num_classes=2,
            in_channels=1,
            spatial_dims=3,
            small_inputs=False,
            recompute=level,
        )
    return training_step(prepared(model, False), image(batch, 1, size, size, size), 2)


LEVELS = ("pointwise", "layer", "block")

BC100 = [
    Contender("plain", "densenet:bc100", baseline=True),
    Contender("plain, channels_last", "densenet:bc100", {"channels_last": True}),
    Contender("plain, torch.compile", "densenet:bc100", {"compiled": True}, slow=True),
    Contender("checkpoint(cat-norm-relu-conv1)", "densenet:bc100", {"checkpointed": True}),
    *(Contender(f"lowtide {level}", "densenet:bc100", {"level": level}) for level in LEVELS),
]
D121 = [
    Contender("torchvision", "densenet:densenet121", {"source": "torchvision"}, needs="torchvision"),
    Contender(
        "torchvision channels_last",
        "densenet:densenet121",
        {"source": "torchvision", "channels_last": True},
        baseline=True,
        needs="torchvision",
    ),
    Contender(
        "torchvision memory_efficient",
        "densenet:densenet121",
        {"source": "torchvision", "memory_efficient": True},
        needs="torchvision",
    ),
    Contender(
        "timm memory_efficient", "densenet:densenet121", {"source": "timm", "memory_efficient": True}, needs="timm"
    ),
    *(Contender(f"lowtide {level}", "densenet:densenet121", {"level": level}) for level in LEVELS),
]
D121_3D = [
    Contender("MONAI", "densenet:densenet121_3d", {"source": "monai"}, baseline=True, needs="monai"),
    *(Contender(f"lowtide {level}", "densenet:densenet121_3d", {"level": level}) for level in LEVELS),
]


def run(*, quick: bool = False, only: str = "") -> list[Figure]:
    repeats = 3 if quick else 9
    figures: list[Figure] = []
    if only in ("", "bc100"):
        figures += run_case("DenseNet-BC 100 k12, batch 64, 32x32", BC100, repeats=repeats)
    if only in ("", "densenet121"):
        figures += run_case("densenet121, batch 16, 224x224", D121, repeats=max(3, repeats // 2))
    if only in ("", "3d"):
        figures += run_case("DenseNet121 3-D, batch 1, 96^3", D121_3D, repeats=repeats)
    return figures
