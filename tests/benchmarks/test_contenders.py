"""What is compared computes the same: every way to run a step gives the plain one's values."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

import peers
import pytest
import torch

import densenet

PACKAGES = {"fft_conv_pytorch": "fft_conv_pytorch", "julius": "julius"}
PACKAGES |= {"nvsubquadratic": "nvsubquadratic", "nvsubquadratic_chunked": "nvsubquadratic"}


def direct(u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(u)
    for lag in range(u.shape[2]):
        y[:, :, lag:] += k[:, lag : lag + 1] * u[:, :, : u.shape[2] - lag]
    return y


@pytest.mark.parametrize("name", peers.CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"not run: {package} is not installed")
    generator = torch.Generator().manual_seed(0)
    u, k, dy = (torch.randn(*shape, generator=generator) for shape in ((2, 8, 33), (8, 33), (2, 8, 33)))
    wants = []
    for dtype in (torch.float64, torch.float32):
        a, b = u.to(dtype).requires_grad_(), k.to(dtype).requires_grad_()
        y = (direct if dtype == torch.float64 else peers.CONVOLUTIONS[name])(a, b)
        wants.append((y.detach(), *torch.autograd.grad(y, (a, b), dy.to(dtype))))
    for oracle, ours in zip(*wants, strict=True):
        assert ours.shape == oracle.shape
        assert (ours - oracle).norm() <= 2e-6 * oracle.norm()
        assert (ours.roll(1, -1) - oracle).norm() > 0.1 * oracle.norm()


def test_every_peer_is_a_contender() -> None:
    used = {c.kwargs["peer"] for c in peers.contenders((1, 2, 3))}
    assert used == set(peers.CONVOLUTIONS) - {"plain"}
    with mock.patch.dict(sys.modules, {"julius": None, "julius.fftconv": None}), pytest.raises(ImportError):
        peers.julius(torch.zeros(1, 1, 4), torch.zeros(1, 4))


@pytest.mark.parametrize("contender", [c for c in densenet.BC100 if not c.slow], ids=lambda c: c.name)
def test_dense_steps_have_the_plain_loss(contender: densenet.Contender) -> None:
    """The losses of two steps: the second one has seen the first one's gradients."""
    losses = []
    for kwargs in ({}, contender.kwargs):
        step = densenet.bc100(**kwargs, batch=4, depth=22)
        losses.append((step(), step()))
    (first, second), (ours_first, ours_second) = losses
    assert abs(first - second) > 1e-3
    assert abs(ours_first - first) < 1e-4
    assert abs(ours_second - second) < 5e-4
