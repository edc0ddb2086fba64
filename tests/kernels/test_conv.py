"""Norm, relu and a convolution that keeps the size in one pass, and its backward, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import (
    ROUNDINGS,
    Case,
    Shape,
    accumulation,
    assert_untouched,
    assert_within,
    buffer,
    eps,
    map_bound,
    wide,
)
from torch import Tensor

from lowtide.kernels import Kernels, TensorCalls

# (images, channels in, channels out, positions, kernel): borders alone, lines, few and many images, three dimensions
GEOMETRIES = [
    (3, 5, 4, (1, 1), (3, 3)),
    (2, 12, 12, (2, 3), (3, 3)),
    (1, 48, 12, (13, 9), (3, 3)),
    (9, 17, 32, (7, 7), (3, 3)),
    (2, 20, 5, (57,), (3,)),
    (1, 9, 3, (4, 5, 6), (3, 3, 3)),
    (2, 6, 7, (8, 5), (1, 5)),
    (0, 4, 4, (3, 3), (3, 3)),
    (2, 130, 24, (19, 11), (3, 3)),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    dims = weight.dim() - 2
    function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[dims - 1]
    return function(x, weight, padding=[size // 2 for size in weight.shape[2:]])


class ConvCase(Case):
    def __init__(self, index: int, form: str, dtype: torch.dtype) -> None:
        n, n_inputs, n_outputs, self.spatial, kernel = GEOMETRIES[index]
        super().__init__(Shape(n, n_inputs, torch.Size(self.spatial).numel()), form, dtype, "relu", index)
        self.out_shape = Shape(n, n_outputs, self.shape.s, self.shape.around)
        numbers = torch.randn(n_outputs, n_inputs, *kernel, generator=self.generator, dtype=torch.float64)
        self.weight = numbers.to(accumulation(dtype))
        self.relu = self.z * self.mask
        self.acc = ROUNDINGS * (4 if dtype == torch.float64 else 1) * eps(accumulation(dtype))

    def grid(self, x: Tensor) -> Tensor:
        return x.double().reshape(*x.shape[:2], *self.spatial)

    def out(self) -> tuple[Tensor, Tensor]:
        return buffer(self.out_shape, self.form, self.dtype, self.generator)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the convolution by its input (N, C, S) and its weight."""
        x, weight = (t.detach().clone().requires_grad_() for t in (self.grid(x), weight.double()))
        dx, dweight = torch.autograd.grad(convolve(x, weight), (x, weight), self.grid(grad))
        return dx.flatten(2), dweight


def check_forward(kernels: Kernels, case: ConvCase) -> None:
    around, out = case.out()
    before, x_before = around.clone(), case.x_buffer.clone()
    kernels.norm_act_conv(case.x, case.scale, case.shift, case.weight, case.spatial, out)
    oracle = convolve(case.grid(case.relu), case.weight.double()).flatten(2)
    magnitude = convolve(case.grid(case.magnitude), case.weight.double().abs()).flatten(2)
    assert_within(out, oracle, map_bound(oracle, magnitude, case.dtype), "out")
    assert_untouched(around, before, case.out_shape)
    assert case.x_buffer.equal(x_before), "x was changed"


def check_backward(kernels: Kernels, case: ConvCase, *, dense: bool = False, wants: str = "masked dweight") -> None:
    grad_around, grad = case.out()
    if dense and case.form == "rows":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    around, masked = case.fresh()
    dweight = torch.randn(case.weight.shape, generator=case.generator).to(case.weight.dtype)
    start = dweight.double().clone()
    before, x_before, grad_before = around.clone(), case.x_buffer.clone(), grad.clone()
    dx, dw = case.backward(grad, case.relu, case.weight)
    dx_magnitude, dw_magnitude = case.backward(grad.abs(), case.magnitude, case.weight.abs())
    m, m_magnitude = dx * case.mask, dx_magnitude * case.mask

    sums, sums_x = kernels.norm_act_conv_backward(
        grad, case.x, case.scale, case.shift, case.mean, case.weight, case.spatial,
        masked=masked if "masked" in wants else None, dweight=dweight if "dweight" in wants else None,
    )  # fmt: skip
    if "masked" in wants:
        assert_within(masked, m, map_bound(m, m_magnitude, case.dtype), "masked")
        spread = m_magnitude * (case.x.double().abs() + wide(case.mean).abs())
        centred = case.x.double() - wide(case.mean)
        assert_within(sums, m.sum((0, 2)), case.acc * m_magnitude.sum((0, 2)), "sums")
        assert_within(sums_x, (m * centred).sum((0, 2)), case.acc * spread.sum((0, 2)), "sums_x")
        assert_untouched(around, before, case.shape)
    else:
        assert around.equal(before)
        assert sums.eq(0).all()
        assert sums_x.eq(0).all()
    if "dweight" in wants:
        assert_within(dweight, start + dw, case.acc * (dw_magnitude + start.abs()), "dweight")
    assert case.x_buffer.equal(x_before), "x was changed"
    assert grad.equal(grad_before), "grad was changed"
    del grad_around


def forms(kernels: Kernels) -> list[str]:
    return ["rows"] if kernels.name == "native" else ["planes", "rows"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(kernels: Kernels, dtype: torch.dtype) -> None:
    for form in forms(kernels):
        for index in range(len(GEOMETRIES)):
            check_forward(kernels, ConvCase(index, form, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["slice", "dense"])
def test_backward(kernels: Kernels, dtype: torch.dtype, dense: bool) -> None:
    for form in forms(kernels):
        for index in range(len(GEOMETRIES)):
            check_backward(kernels, ConvCase(index, form, dtype), dense=dense)


@pytest.mark.parametrize("wants", ["masked", "dweight"])
def test_backward_of_what_is_asked_for(kernels: Kernels, wants: str) -> None:
    for index in (1, 5):
        check_backward(kernels, ConvCase(index, "rows", torch.float32), wants=wants)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backward_in_half_precision(kernels: Kernels, dtype: torch.dtype) -> None:
    """By norms: a provider may round m to the map's dtype before it sums it."""
    case = ConvCase(8, "rows", dtype)
    _, grad = case.out()
    _, masked = case.fresh()
    dweight = torch.zeros_like(case.weight)
    dx, dw = case.backward(grad, case.relu, case.weight)
    m = dx * case.mask
    arguments = (grad, case.x, case.scale, case.shift, case.mean, case.weight, case.spatial)
    sums, _ = kernels.norm_act_conv_backward(*arguments, masked=masked, dweight=dweight)
    assert (masked.double() - m).norm() <= eps(dtype) * m.norm()
    assert (sums.double() - m.sum((0, 2))).norm() <= eps(dtype) * m.abs().sum((0, 2)).norm()
    assert (dweight.double() - dw).norm() <= 1e-5 * dw.norm()


def test_parts_of_an_image_agree_with_the_whole(kernels: Kernels) -> None:
    """One image on several threads is cut along its lines; the lines beside a cut are multiplied twice."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for index in (2, 4, 5, 8):
                check_forward(kernels, ConvCase(index, "rows", torch.float32))
                check_backward(kernels, ConvCase(index, "rows", torch.float32))
    finally:
        torch.set_num_threads(before)


class WrapsRound(TensorCalls):
    """Taps beyond the end of a line read the next line's first positions, as a loop without borders would."""

    def norm_act_conv(self, x, scale, shift, weight, spatial, out):
        super().norm_act_conv(x, scale, shift, weight[:, :, 1:2], (1, x.shape[2]), out)


class NotTurnedRound(TensorCalls):
    """The weight gradient has its taps in the wrong order."""

    def norm_act_conv_backward(self, *arguments, masked, dweight):
        turned = torch.zeros_like(dweight)
        result = super().norm_act_conv_backward(*arguments, masked=masked, dweight=turned)
        dweight += turned.flip(tuple(range(2, turned.dim())))
        return result


def test_faults_are_refused() -> None:
    case = ConvCase(2, "rows", torch.float32)
    with pytest.raises(AssertionError, match="out"):
        check_forward(WrapsRound(), case)
    with pytest.raises(AssertionError, match="dweight"):
        check_backward(NotTurnedRound(), case)
