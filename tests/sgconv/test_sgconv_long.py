"""Whole layers on long sequences in float32, against float64 sums at some positions and taps, without transforms."""

from __future__ import annotations

import pytest
import torch
from sgconv_compare import assert_near
from torch import Tensor
from torch.nn import functional as F

from lowtide.nn import SGConv


def padded_kernels(layer: SGConv, L: int) -> tuple[Tensor, Tensor]:
    """(H, L) both, float64: forward taps, and reverse taps; pieces stretched by the interpolation of torch."""
    form = layer.form.kernel
    rows = []
    for i, piece in enumerate(layer.kernel_list):
        r = 2 ** (max(0, i - 1) + form.init_scale)
        stretched = F.interpolate(piece.detach().double(), scale_factor=float(r), mode="linear", align_corners=False)
        rows.append(stretched * layer.multiplier.double() ** (form.n_scales - 1 - i))
    kernel = torch.cat(rows, -1)
    kernel = kernel / kernel.norm(dim=-1, keepdim=True)
    forward, reverse = F.pad(kernel[..., :L], (0, max(0, L - kernel.shape[-1])))
    return forward, reverse


def at_position(u_HL: Tensor, forward: Tensor, reverse: Tensor, t: int) -> Tensor:
    """sum_j forward[j] u[t-j] + sum_j reverse[j] u[t+j+1], for one t: (H,)."""
    L = u_HL.shape[1]
    past = (forward[:, : t + 1] * u_HL[:, : t + 1].flip(1)).sum(1)
    future = (reverse[:, : L - 1 - t] * u_HL[:, t + 1 :]).sum(1)
    return past + future


@pytest.mark.parametrize("L", [65_536, 1_000_000])
@pytest.mark.parametrize("level", ["pointwise", "layer"])
def test_long_layers_equal_sums_written_out_at_some_places(level, L):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    d, H = 32, 2
    layer = SGConv(H, L, kernel_dim=d, bidirectional=True, linear=True, recompute=level)
    forward, reverse = padded_kernels(layer, L)
    u = torch.randn(1, H, L, generator=generator).requires_grad_()
    dy = torch.randn(1, H, L, generator=generator)
    y = layer(u)
    y.backward(dy)
    wide, dwide = u.detach()[0].double(), dy[0].double()
    skip = layer.D.detach().double()[0]
    edges = [0, 1, d, L // 3, L // 2, L - 2, L - 1]
    places = [*edges, *torch.randint(L, (9,), generator=generator).tolist()]
    want = torch.stack([at_position(wide, forward, reverse, t) + skip * wide[:, t] for t in places], 1)
    assert_near(y[0][:, places], want, 1e-6, "y")
    # du is the convolution of dy turned round: forward and reverse taps change places and the lag moves by one
    du = torch.stack(
        [
            (forward[:, : L - t] * dwide[:, t:]).sum(1)
            + (reverse[:, :t] * dwide[:, :t].flip(1)).sum(1)
            + skip * dwide[:, t]
            for t in places
        ],
        1,
    )
    assert u.grad is not None
    assert_near(u.grad[0][:, places], du, 1e-6, "du")
    # the first two pieces are not stretched: their gradient is that of 2 d taps; stretched ones are sums of many taps
    taps = [
        torch.stack([(dwide[:, j:] * wide[:, : L - j]).sum(1) for j in range(2 * d)], 1),
        torch.stack([(dwide[:, : L - j - 1] * wide[:, j + 1 :]).sum(1) for j in range(2 * d)], 1),
    ]
    S = layer.form.kernel.n_scales
    for i in range(2):
        scale = layer.multiplier.double()[0] ** (S - 1 - i) / layer.kernel_norm.double()
        grad = layer.kernel_list[i].grad
        assert grad is not None
        assert_near(grad, torch.stack(taps)[..., i * d : (i + 1) * d] * scale, 1e-6, f"piece {i}")
    assert layer.D.grad is not None
    assert_near(layer.D.grad[0], (dwide * wide).sum(1), 1e-6, "dD")
    # a number of the last piece reaches many taps, by a tent that is cut at L
    last = layer.kernel_list[S - 1]
    assert last.grad is not None
    r, start = 2 ** (S - 2), d * 2 ** (S - 2)
    tents = F.interpolate(torch.eye(d, dtype=torch.float64)[:, None], scale_factor=float(r), mode="linear")[:, 0]
    cut = tents[:, : L - start]
    for c, (u_HL, dy_HL) in enumerate(((wide, dwide), (wide.flip(1)[:, :-1], dwide.flip(1)[:, 1:]))):
        # turned round, and the lag one less: reverse taps as forward ones
        share = torch.stack([tent_projection(u_HL, dy_HL, tent, start) for tent in cut], 1)
        assert_near(last.grad[c], share / layer.kernel_norm.double()[c], 1e-6, f"last piece {c}")


def tent_projection(u_HL: Tensor, dy_HL: Tensor, tent: Tensor, start: int) -> Tensor:
    """sum_t dy[t] sum_q tent[q] u[t - start - q]: piecewise linear, so running sums do it. (H,)"""
    L = u_HL.shape[1]
    assert start < L
    # second differences of the tent are a few impulses; convolving with impulses and summing twice is exact in float64
    slope = torch.diff(F.pad(tent, (1, 1)))
    bend = torch.diff(F.pad(slope, (1, 1)))  # zero but at the tent's corners
    corners = torch.nonzero(bend.abs() > 1e-12 * tent.abs().max()).flatten().tolist()
    assert len(corners) <= 10
    n = L - start
    out = torch.zeros_like(u_HL[:, :n])
    for c in corners:
        if c < n:
            out[:, c:] += bend[c] * u_HL[:, : n - c]
    out = out.cumsum(1).cumsum(1)
    return (out * dy_HL[:, start:]).sum(1)
