"""What runs again in backward, and FLOPs, against counts made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.measure import Operators, measure

B, D = 6, 10
PRODUCT = 2 * B * D * D  # multiply-adds of one (B, D) x (D, D) product, times two


class Recomputed(torch.autograd.Function):
    """tanh(x W), keeping x and W alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        y = (x @ w).tanh()
        dz = grads[0] * (1 - y * y)
        return dz @ w.T, x.T @ dz


def operators(fn: Any, *args: Any) -> Operators:
    counted = measure(fn, *args, repeats=1, operators=True).operators
    assert counted is not None
    return counted


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(B, D, generator=generator), torch.randn(D, D, generator=generator)
    return x.requires_grad_(), w.requires_grad_()


def plain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def test_a_plain_function_redoes_nothing() -> None:
    counted = operators(plain, *inputs())
    assert (counted.forward_flops, counted.backward_flops) == (PRODUCT, 2 * PRODUCT)
    assert counted.repeated == ()
    assert counted.forward_count == 2


def test_a_custom_function_that_recomputes_is_seen() -> None:
    counted = operators(Recomputed.apply, *inputs())
    assert {(r.name, r.count, r.flops) for r in counted.repeated} == {
        ("aten.mm", 1, PRODUCT),
        ("aten.tanh", 1, 0),
    }
    assert counted.backward_flops == 3 * PRODUCT
    assert counted.against(operators(plain, *inputs())) == pytest.approx(4 / 3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_seen(reentrant: bool) -> None:
    x, w = inputs()
    counted = operators(lambda a, b: checkpoint(plain, a, b, use_reentrant=reentrant), x, w)
    assert counted.repeated_count == 2
    assert counted.repeated_flops == PRODUCT


def test_square_products_of_a_gradient_are_not_taken_for_a_recomputation() -> None:
    # x W, dy W^T and x^T dy have the same operator and the same shapes here: only the values tell them apart
    x, w = (torch.randn(D, D, requires_grad=True) for _ in range(2))
    counted = operators(lambda a, b: a @ b, x, w)
    assert counted.backward_count == 2
    assert counted.repeated == ()


def test_convolution_and_fft_flops() -> None:
    conv = nn.Conv2d(3, 5, 3, padding=1)
    with torch.no_grad():
        assert operators(conv, torch.randn(2, 3, 8, 8)).forward_flops == 2 * (2 * 8 * 8) * 5 * (3 * 9)
        n = 64
        x = torch.randn(7, n)
        half = 7 * 2.5 * n * math.log2(n)
        assert operators(torch.fft.rfft, x).forward_flops == half
        assert operators(torch.fft.irfft, torch.fft.rfft(x)).forward_flops == half
        assert operators(torch.fft.fft, torch.fft.fft(x)).forward_flops == 2 * half


def test_against_a_form_without_flops() -> None:
    nothing = operators(lambda x: x.exp(), torch.randn(3))
    assert nothing.against(nothing) == 1.0
    assert operators(plain, *inputs()).against(nothing) == math.inf


def test_the_table_names_what_ran_again() -> None:
    text = str(measure(Recomputed.apply, *inputs(), repeats=1, operators=True))
    assert "ran again in backward: 2 operators, 1.2 k FLOPs" in text
    assert "1 x aten.mm" in text
