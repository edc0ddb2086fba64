"""A lowtide network in a loop with Hugging Face Accelerate, unchanged.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowtide.models import densenet_bc


def fit(network: nn.Module, images: Tensor, classes: Tensor, epochs: int = 2) -> nn.Module:
    """Train on all images in their order, 8 at a time on each process."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images, classes), batch_size=8)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    network.train()
    for _ in range(epochs):
        for batch_images, batch_classes in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(network(batch_images), batch_classes))
            optimizer.step()
    return accelerator.unwrap_model(network)


if __name__ == "__main__":
    fit(densenet_bc(22, 12, recompute="layer"), torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    PartialState().destroy_process_group()
