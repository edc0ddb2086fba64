"""The plain twins against sums written out number by number in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from sgconv_direct import direct_kernel, direct_long_conv

from lowtide.reference.long_conv import long_conv
from lowtide.reference.sgconv_kernel import kernel_norm, sgconv_kernel
from lowtide.sgconv_form import KernelForm, scales_for

FORMS = [
    KernelForm(
        kernel_dim=d, n_scales=S, init_scale=s0, combine=combine, interpolation=interpolation, alignment=alignment
    )
    for d, S, s0 in [(1, 5, 0), (2, 4, 1), (5, 1, 0), (5, 1, 2), (8, 4, 0)]
    for combine in ("cat", "sum")
    for interpolation, alignment in [
        ("linear", "half_pixel"),
        ("linear", "align_corners"),
        ("linear", "drop_last"),
        ("linear", "wrap"),
        ("nearest", "half_pixel"),
    ]
]


def make_pieces(form: KernelForm, C: int = 2, H: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(C, H, form.kernel_dim, generator=generator, dtype=torch.float64) for _ in range(form.n_scales)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("powered", [False, True])
def test_kernel_equals_the_sum_written_out(form, powered):
    pieces = make_pieces(form)
    multiplier = (
        torch.ones((), dtype=torch.float64) if powered else torch.linspace(1, 3, 3, dtype=torch.float64).view(1, 3, 1)
    )
    decay = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if powered else None
    norm = kernel_norm(pieces, multiplier, decay, form)
    expected = direct_kernel(pieces, multiplier, decay, form)
    torch.testing.assert_close(norm, expected.square().sum(-1, keepdim=True).sqrt(), rtol=1e-13, atol=0)
    for length in {0, 1, form.taps // 2 + 1, form.taps, form.taps + 3}:
        got = sgconv_kernel(pieces, multiplier, decay, norm, form, length)
        want = torch.zeros(2, 3, length, dtype=torch.float64)
        want[..., : form.taps] = (expected / norm)[..., :length]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_alignments_differ_from_each_other():
    values = []
    for alignment in ("half_pixel", "align_corners", "drop_last", "wrap"):
        form = KernelForm(4, 3, alignment=alignment)
        values.append(sgconv_kernel(make_pieces(form), torch.ones(()), None, None, form, form.taps))
    for a, b in itertools.combinations(values, 2):
        assert (a - b).norm() > 0.05 * a.norm()


@pytest.mark.parametrize("L", [1, 2, 3, 5, 7, 16, 17])
@pytest.mark.parametrize("K", [1, 2, 7, 40])
@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_long_conv_equals_the_sum_written_out(L, K, two_sided, channels):
    generator = torch.Generator().manual_seed(L * 100 + K)
    lead = (2, 3) if channels else (3,)
    u = torch.randn(2, 3, L, generator=generator, dtype=torch.float64)
    k = torch.randn(*lead, K, generator=generator, dtype=torch.float64)
    k_reverse = torch.randn(*lead, K, generator=generator, dtype=torch.float64) if two_sided else None
    skip = torch.randn(*lead, generator=generator, dtype=torch.float64)
    want = direct_long_conv(u, k, skip, k_reverse)
    assert want.norm() > 0
    torch.testing.assert_close(long_conv(u, k, skip, k_reverse=k_reverse), want, rtol=1e-12, atol=1e-12)
    if not two_sided:
        torch.testing.assert_close(long_conv(u, k, skip, exact_causal=True), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("l_max", "kernel_dim", "init_scale", "scales"),
    [
        (2048, 1, 0, 12),
        (4096, 2, 0, 12),
        (4000, 1, 0, 13),
        (1024, 32, 0, 6),
        (16384, 64, 1, 8),
        (1, 64, 0, 1),
        (33, 32, 0, 2),
    ],
)
def test_scales(l_max, kernel_dim, init_scale, scales):
    assert scales_for(l_max, kernel_dim, init_scale) == scales
