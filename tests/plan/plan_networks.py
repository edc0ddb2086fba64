"""Networks to plan and to run: a function per kind, the batch is an argument; and what a real step takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.measure import measure
from lowtide.models import DenseNet, SequenceModel, densenet_bc

Make = Callable[[int], tuple[nn.Module, Tensor]]


def bc(batch: int) -> tuple[nn.Module, Tensor]:
    """lowtide's DenseNet for small images."""
    return densenet_bc(22, 12), torch.randn(batch, 3, 32, 32)


def torchvision(batch: int) -> tuple[nn.Module, Tensor]:
    """To be converted: blocks of torchvision's class."""
    models = __import__("torchvision.models.densenet", fromlist=["DenseNet"])
    return models.DenseNet(16, (4, 6, 3), 32, num_classes=10), torch.randn(batch, 3, 96, 96)


def monai_3d(batch: int) -> tuple[nn.Module, Tensor]:
    """To be converted, with three axes, dropout, and transitions of another spelling."""
    nets = __import__("monai.networks.nets", fromlist=["DenseNet"])
    model = nets.DenseNet(3, 1, 2, init_features=16, growth_rate=8, block_config=(3, 4), dropout_prob=0.1)
    return model, torch.randn(batch, 1, 32, 32, 32)


def sequence(batch: int) -> tuple[nn.Module, Tensor]:
    """Long convolutions, two-sided, with dropout."""
    model = SequenceModel(4, 5, 24, 2, 300, kernel_dim=16, bidirectional=True, dropout=0.1)
    return model, torch.randn(batch, 300, 4)


def stem(batch: int) -> tuple[nn.Module, Tensor]:
    """lowtide's DenseNet for large images."""
    model = DenseNet(12, (3, 4), num_init_features=24, small_inputs=False, drop_rate=0.1)
    return model, torch.randn(batch, 3, 64, 64)


NETWORKS: dict[str, tuple[Make, tuple[int, int]]] = {
    "bc": (bc, (4, 16)),
    "torchvision": (torchvision, (2, 5)),
    "monai-3d": (monai_3d, (2, 4)),
    "sequence": (sequence, (2, 5)),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3, weight_decay=1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}


def there_anyway(model: nn.Module, x: Tensor) -> int:
    """Bytes of parameters, buffers and the input."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), x))


def measured_peak(model: nn.Module, x: Tensor, optimizer: str | None) -> int:
    """Bytes at the highest moment of the second of two training steps, by the events of torch's allocator.

    The first makes the optimiser's state. Its events are in the record too, and cannot be higher.
    """
    model = copy.deepcopy(model).train()
    make = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())

    def steps() -> None:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = None
            out = model(x)  # alive during the backward, as in most loops
            out.mean().backward()
            if make is not None:
                make.step()

    return there_anyway(model, x) + measure(steps, repeats=1).peak_bytes
