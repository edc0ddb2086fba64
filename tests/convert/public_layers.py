"""Layers of the public SGConv shape, written for these tests: its state dict's names and shapes, (y, None) returned."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TimeLastLinear(nn.Module):
    """A map of the features of (B, H, L)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,bil->bol", self.weight, x) + self.bias


class PublicLayer(nn.Module):
    """The kernel's form stands in `how`, a name of its own: what a converter knows, it knows by trying."""

    kernel_norm: Tensor
    kernel_norm_initialized: Tensor
    multiplier: Tensor

    def __init__(
        self,
        features: int = 5,
        kernel_dim: int = 4,
        scales: int = 3,
        channels: int = 1,
        *,
        both_sides: bool = False,
        how: tuple[str, str, int] = ("cat", "linear", 0),
        power: bool | None = None,
        act: nn.Module | None = None,
        gate: bool = False,
        drop: float = 0.0,
        layer_norm: bool = False,
        time_last: bool = True,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.how, self.both_sides, self.time_last, self.linear = how, both_sides, time_last, linear
        rows = channels * (2 if both_sides else 1)
        self.D = nn.Parameter(torch.randn(channels, features))
        self.kernel_list = nn.ParameterList(torch.randn(rows, features, kernel_dim) for _ in range(scales))
        if power is None:
            self.register_buffer("multiplier", torch.linspace(1.5, 2.5, features).view(1, features, 1))
        else:
            self.register_buffer("multiplier", torch.tensor(1.0))
            self.decay = nn.Parameter(torch.rand(features) + 0.5, requires_grad=power)
        self.register_buffer("kernel_norm", torch.ones(rows, features, 1))
        self.register_buffer("kernel_norm_initialized", torch.tensor(False))
        if not linear:
            self.activation = nn.GELU() if act is None else copy.deepcopy(act)
            self.dropout: nn.Module = nn.Identity()
            if drop:
                self.dropout = nn.Dropout1d(drop) if time_last else nn.Dropout(drop)
            self.norm = nn.LayerNorm(channels * features) if layer_norm else nn.Identity()
            width = features * (2 if gate else 1)
            make = TimeLastLinear if time_last else nn.Linear
            output: nn.Module = make(channels * features, width)
            self.output_linear = nn.Sequential(output, nn.GLU(1 if time_last else 2)) if gate else output

    def kernel(self) -> Tensor:
        combine, mode, start = self.how
        count, parts = len(self.kernel_list), []
        for i, piece in enumerate(self.kernel_list):
            stretch = 2 ** (start + (i if combine == "sum" else max(0, i - 1)))
            part = F.interpolate(piece, scale_factor=stretch, mode=mode)
            parts.append(part * self.multiplier ** (count - 1 - i))
        if combine == "cat":
            k = torch.cat(parts, -1)
        else:
            k = torch.stack([F.pad(part, (0, parts[-1].shape[-1] - part.shape[-1])) for part in parts]).sum(0)
        if hasattr(self, "decay"):
            k = k * torch.exp(-self.decay[:, None] * torch.log(torch.arange(k.shape[-1]) + 1))
        return k

    def forward(self, u: Tensor, return_kernel: bool = False) -> Any:
        u = u if self.time_last else u.transpose(1, 2)
        length, k = u.shape[-1], self.kernel()
        if not self.kernel_norm_initialized:
            self.kernel_norm = k.norm(dim=-1, keepdim=True).detach()
            self.kernel_norm_initialized = torch.tensor(True)
        k = F.pad(k[..., :length], (0, max(0, length - k.shape[-1]))) / self.kernel_norm
        size = 2 * length
        spectrum = torch.fft.rfft(k.chunk(2)[0] if self.both_sides else k, n=size)
        if self.both_sides:
            behind = F.pad(k.chunk(2)[1].flip(-1), (length, 0))
            spectrum = spectrum + torch.fft.rfft(behind, n=size)
        y = torch.fft.irfft(torch.fft.rfft(u, n=size)[:, None] * spectrum, n=size)[..., :length]
        y = (y + u[:, None] * self.D[..., None]).flatten(1, 2)
        if not self.linear:
            y = self.dropout(self.activation(y))
        y = y if self.time_last else y.transpose(1, 2)
        if not self.linear:
            y = self.norm(y)
            y = self.output_linear(y)
        return (y, k) if return_kernel else (y, None)


class PublicModel(nn.Module):
    """Two such layers with skips."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 5), nn.Linear(5, 3)
        self.layers = nn.ModuleList(PublicLayer(**options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        h = h.transpose(1, 2) if self.layers[0].time_last else h
        for layer in self.layers:
            h = h + layer(h)[0]
        h = h if not self.layers[0].time_last else h.transpose(1, 2)
        return self.decoder(h.mean(1))
