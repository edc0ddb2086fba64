"""Weights, inputs and expected outputs for the streaming tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.reference.long_conv import long_conv
from lowtide.reference.sgconv_kernel import sgconv_kernel
from lowtide.sgconv_form import KernelForm

SHAPES = [
    ("linear", "half_pixel"),
    ("linear", "align_corners"),
    ("linear", "drop_last"),
    ("linear", "wrap"),
    ("nearest", "half_pixel"),
]


@dataclass
class Weights:
    """The arguments of `prepare`, of one dtype."""

    form: KernelForm
    pieces: list[Tensor]
    multiplier: Tensor
    decay: Tensor | None
    norm: Tensor
    skip: Tensor
    bidirectional: bool

    def arguments(self, dtype: torch.dtype = torch.float64) -> tuple[tuple, dict]:
        def cast(x):
            return None if x is None else x.to(dtype)

        tensors = (
            [cast(p) for p in self.pieces],
            cast(self.multiplier),
            cast(self.decay),
            cast(self.norm),
            cast(self.skip),
        )
        return tensors, {"form": self.form, "bidirectional": self.bidirectional}

    def kernels(self) -> tuple[Tensor, Tensor | None]:
        """Forward taps (C, H, K) in float64 with the skip term in lag 0, and reverse taps."""
        taps = sgconv_kernel(self.pieces, self.multiplier, self.decay, self.norm, self.form, self.form.taps)
        forward, reverse = taps.chunk(2) if self.bidirectional else (taps, None)
        forward = forward.clone()
        forward[..., 0] += self.skip
        return forward, reverse


def make_weights(form: KernelForm, C: int = 1, H: int = 3, bidirectional: bool = False, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = C * (2 if bidirectional else 1)
    power = form.decay != "scale"
    return Weights(
        form,
        [draw(total, H, form.kernel_dim) for _ in range(form.n_scales)],
        torch.ones((), dtype=torch.float64) if power else torch.linspace(1, 2, H, dtype=torch.float64).view(1, H, 1),
        torch.linspace(0.3, 1.5, H, dtype=torch.float64) if power else None,
        draw(total, H, 1).abs() + 1,
        draw(C, H),
        bidirectional,
    )


def direct(u: Tensor, weights: Weights) -> Tensor:
    """y (B, C, H, L) in float64 by one product of a Toeplitz matrix, whose entries are taps, with the inputs."""
    forward, reverse = weights.kernels()
    L, K = u.shape[-1], forward.shape[-1]
    lag = torch.arange(L)[:, None] - torch.arange(L)
    matrix = torch.where((lag >= 0) & (lag < K), forward[..., lag.clamp(0, K - 1)], 0.0)
    if reverse is not None:
        ahead = -lag - 1
        matrix = matrix + torch.where((ahead >= 0) & (ahead < K), reverse[..., ahead.clamp(0, K - 1)], 0.0)
    return torch.einsum("chts,bhs->bcht", matrix, u.double())


def by_transform(u: Tensor, weights: Weights) -> Tensor:
    """The same for sequences that are too long for a matrix: the plain long convolution in float64."""
    forward, reverse = weights.kernels()
    return long_conv(u.double(), forward, k_reverse=reverse)


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    scale = want.norm().item()
    assert scale > 0
    return (got.double() - want).norm().item() / scale


def block_sizes(name: str, total: int) -> list[int]:
    """Sizes that add up to `total`: all of one size, or "random", or "1000+1"."""
    generator = torch.Generator().manual_seed(total)
    sizes: list[int] = []
    while sum(sizes) < total:
        if name == "random":
            size = int(torch.tensor([0, 1, 1, 2, 5, 20, 63, 300])[torch.randint(8, (), generator=generator)])
        elif name == "1000+1":
            size = 1 if len(sizes) % 2 else 1000
        else:
            size = int(name)
        sizes.append(min(size, total - sum(sizes)))
    return sizes


def stream(module, u: Tensor, state, filter, sizes: list[int]) -> Tensor:
    """Feed u (B, H, L) in blocks of these sizes."""
    assert sum(sizes) == u.shape[-1]
    outputs, start = [], 0
    for size in sizes:
        outputs.append(module.block(u[..., start : start + size], state, filter))
        start += size
    return torch.cat(outputs, dim=-1)
