"""The lean kernel: every form and every length against the numbers written out, its adjoint, its norm, its memory."""

from __future__ import annotations

import pytest
import torch
from sgconv_compare import assert_near
from sgconv_direct import direct_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.functional import sgconv_kernel as public_kernel
from lowtide.lean.sgconv_kernel import kernel_norm, sgconv_kernel
from lowtide.sgconv_form import KernelForm

STYLES = [
    ("linear", "half_pixel"),
    ("linear", "align_corners"),
    ("linear", "drop_last"),
    ("linear", "wrap"),
    ("nearest", "half_pixel"),
]


def make(form: KernelForm, *, powered: bool = False, C: int = 2, H: int = 3, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (C, H, form.kernel_dim)
    pieces = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(form.n_scales)]
    multiplier = torch.ones(()) if powered else torch.linspace(1, 3, H).view(1, H, 1)
    decay = torch.linspace(0.5, 2, H).to(dtype) if powered else None
    return pieces, multiplier.to(dtype), decay


@pytest.mark.parametrize("stretch", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("combine", ["cat", "sum"])
@pytest.mark.parametrize(("interpolation", "alignment"), STYLES)
def test_first_n_taps_equal_the_prefix_of_the_full_kernel_for_every_n(stretch, combine, interpolation, alignment):
    doublings = stretch.bit_length() - 1
    for d in (1, 3):
        form = KernelForm(d, 2, doublings, combine, interpolation, alignment)
        pieces, multiplier, _ = make(form)
        full = direct_kernel(pieces, multiplier, None, form)
        for n in range(form.taps + 2):
            got = sgconv_kernel(pieces, multiplier, None, None, form, n)
            torch.testing.assert_close(got[..., : form.taps], full[..., :n], rtol=0, atol=1e-13)
            assert got.shape[-1] == n
            assert not got[..., form.taps :].any()


@pytest.mark.parametrize("powered", [False, True])
@pytest.mark.parametrize("combine", ["cat", "sum"])
@pytest.mark.parametrize(("interpolation", "alignment"), STYLES)
@pytest.mark.parametrize("share", [0.3, 0.71, 1.0, 1.1])
def test_values_norm_and_gradients_equal_the_sum_written_out(powered, combine, interpolation, alignment, share):
    form = KernelForm(5, 5, 1, combine, interpolation, alignment)
    pieces, multiplier, decay = make(form, powered=powered)
    inputs = [p.requires_grad_() for p in pieces] + ([decay.requires_grad_()] if decay is not None else [])
    written = direct_kernel(pieces, multiplier, decay, form)
    norm = kernel_norm(pieces, multiplier, decay, form)
    assert_near(norm, written.detach().square().sum(-1, keepdim=True).sqrt(), 1e-13, "norm")
    n = round(form.taps * share)
    want = torch.nn.functional.pad((written / norm)[..., :n], (0, max(0, n - form.taps)))
    got = sgconv_kernel(pieces, multiplier, decay, norm, form, n)
    assert_near(got, want, 1e-13, "taps")
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(want, inputs, weights, allow_unused=True)
    for i, (a, b) in enumerate(zip(torch.autograd.grad(got, inputs, weights), expected, strict=True)):
        if b is None:
            assert not a.any(), f"piece {i} does not reach into the taps"
        else:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_kernel_dim_one_gives_constant_blocks():
    form = KernelForm(1, 4)
    pieces, multiplier, _ = make(form)
    kernel = sgconv_kernel(pieces, multiplier, None, None, form, form.taps)
    for i, (start, stop) in enumerate([(0, 1), (1, 2), (2, 4), (4, 8)]):
        want = (pieces[i] * multiplier ** (3 - i)).expand(-1, -1, stop - start)
        torch.testing.assert_close(kernel[..., start:stop], want, rtol=1e-14, atol=0)


def test_learned_decay_gradcheck():
    form = KernelForm(3, 3, decay="power")
    pieces, multiplier, decay = make(form, powered=True, C=1, H=2)
    assert decay is not None
    inputs = [decay.requires_grad_(), *(p.requires_grad_() for p in pieces)]

    def build(decay, *pieces):
        return sgconv_kernel(pieces, multiplier, decay, None, form, 10)

    assert torch.autograd.gradcheck(build, inputs)


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize(("interpolation", "alignment"), STYLES)
@pytest.mark.parametrize("combine", ["cat", "sum"])
def test_a_truncated_kernel_is_built_without_its_tail(interpolation, alignment, combine):
    form = KernelForm(4, 15, 0, combine, interpolation, alignment)
    pieces, multiplier, _ = make(form, dtype=torch.float32)
    n = 100
    with LargestTensor() as seen:
        sgconv_kernel(pieces, multiplier, None, None, form, n)
    # two rows times three features of n taps, or one ramp of a cell: never the 65,536 taps of the whole
    widest = max(2 * 3 * n, 2 ** (form.n_scales - 1) if combine == "sum" else n)
    assert 0 < seen.numbers <= widest


def test_half_precision_pieces_make_a_float32_kernel():
    form = KernelForm(4, 12)
    pieces, multiplier, _ = make(form, dtype=torch.float16)
    raw = sgconv_kernel(pieces, multiplier, None, None, form, form.taps)
    assert raw.dtype == torch.float32
    wide = direct_kernel([p.double() for p in pieces], multiplier.double(), None, form)
    assert wide.abs().max() > torch.finfo(torch.float16).max  # in half precision it would overflow
    assert_near(raw, wide, 1e-6)


def test_refusals():
    form = KernelForm(2, 2)
    pieces, multiplier, _ = make(form)
    with pytest.raises(UnsupportedError, match="constant multiplier"):
        sgconv_kernel(pieces, multiplier.requires_grad_(), None, None, form, 4)
    pieces[0].requires_grad_()
    kernel = sgconv_kernel(pieces, multiplier.detach(), None, None, form, 4)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(kernel.sum(), pieces[:1], create_graph=True)
    with pytest.raises(ArgumentError, match="length >= 0"):
        public_kernel(pieces, multiplier.detach(), None, None, form, -1)
