"""A lowtide network inside Lightning's Trainer, unchanged: `python examples/lightning_trainer.py`."""

from __future__ import annotations

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowtide.models import densenet_bc


class Classifier(lightning.LightningModule):
    """Any module that maps images to scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.network(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(network: nn.Module, images: Tensor, classes: Tensor, epochs: int = 2) -> nn.Module:
    """Train on all images in their order, 8 at a time."""
    loader = DataLoader(TensorDataset(images, classes), batch_size=8)
    precision = "64-true" if images.dtype == torch.float64 else "32-true"
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(network), loader)
    return network


if __name__ == "__main__":
    fit(densenet_bc(22, 12, recompute="layer"), torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
