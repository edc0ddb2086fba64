"""The parity cases must refuse wrong passes: the faults that a hand-written vector loop invites, and quieter ones."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import CHECKS, SHAPES, Case, check_act_backward_accumulate
from torch import Tensor

from lowtide.kernels import Activation, Kernels, TensorCalls

LANES = 16  # float32 numbers in a register


class TailSkipped(TensorCalls):
    """Numbers after the last full register are left as they were."""

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        full = x.shape[2] // LANES * LANES
        super().scale_shift_act(x[:, :, :full], scale, shift, act, out[:, :, :full])


class WrongLane(TensorCalls):
    """In the last lane of each register the neighbouring channel's scale is used."""

    def act_backward_accumulate(
        self,
        grad_z: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        act: Activation,
        mean: Tensor,
        total: Tensor,
        sums: Tensor,
        sums_x: Tensor,
    ) -> None:
        scale = scale.clone()
        scale[LANES - 1 :: LANES] = scale[LANES - 2 :: LANES][: len(scale[LANES - 1 :: LANES])]
        super().act_backward_accumulate(grad_z, x, scale, shift, act, mean, total, sums, sums_x)


class Race(TensorCalls):
    """Two threads, each with half of the positions, store into one sum: the second overwrites the first."""

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        half = x.shape[2] // 2
        first = super().act_backward_sums_(grad[:, :, :half], x[:, :, :half], scale, shift, act, mean)
        second = super().act_backward_sums_(grad[:, :, half:], x[:, :, half:], scale, shift, act, mean)
        # both started from the same value; one channel's update of the first thread is lost
        lost = torch.arange(len(mean)) == len(mean) - 1
        total, total_x = (torch.where(lost, b, a + b) for a, b in zip(first, second, strict=True))
        return total, total_x


class SumsInOrder(TensorCalls):
    """One float32 accumulator for all numbers: the error grows with N * S."""

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        terms = x.transpose(0, 1).flatten(1).float()
        mean = terms.cumsum(1)[:, -1] / terms.shape[1] if terms.shape[1] else terms.mean(1)
        return mean.to(torch.float64 if x.dtype == torch.float64 else torch.float32), super().batch_stats(x)[1]


class NotCentred(TensorCalls):
    """The variance as E[x^2] - E[x]^2 in float32."""

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = super().batch_stats(x)
        return mean, x.float().square().mean((0, 2)).to(variance.dtype) - mean.square()


class MaskOfTheOutside(TensorCalls):
    """The gradient is masked by x instead of scale * x + shift."""

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        return super().act_backward_sums_(grad, x, torch.ones_like(scale), torch.zeros_like(shift), act, mean)


class RoundedTwice(TensorCalls):
    """A half-precision result goes through its own dtype before the shift."""

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        product = (x * scale[:, None]).to(out.dtype)
        super().scale_shift_act(product, torch.ones_like(scale), shift, act, out)


class Spills(TensorCalls):
    """A whole register is stored at the end of a row: the next channel's first number is overwritten."""

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        super().affine_add_(grad, scale, x, slope, offset)
        n_images, n_channels, n_positions = grad.shape
        if grad.numel() and grad.stride(1) > 1:
            wider = grad.as_strided((n_images, n_channels + 1, n_positions), grad.stride(), grad.storage_offset())
            wider[:, -1, 0] = 0


def is_refused(kernels: Kernels, name: str, dtype: torch.dtype) -> bool:
    for form in ("planes", "rows"):
        for seed, shape in enumerate(SHAPES):
            try:
                CHECKS[name](kernels, Case(shape, form, dtype, "relu", seed))
            except AssertionError:
                return True
    return False


@pytest.mark.parametrize(
    ("fault", "name", "dtype"),
    [
        (TailSkipped, "scale_shift_act", torch.float32),
        (WrongLane, "act_backward_accumulate", torch.float32),
        (Race, "act_backward_sums_", torch.float32),
        (SumsInOrder, "batch_stats", torch.float64),
        (MaskOfTheOutside, "act_backward_sums_", torch.float32),
        (RoundedTwice, "scale_shift_act", torch.bfloat16),
        (RoundedTwice, "scale_shift_act", torch.float16),
        (Spills, "affine_add_", torch.float32),
    ],
)
def test_fault_is_refused(fault: type[TensorCalls], name: str, dtype: torch.dtype) -> None:
    assert not is_refused(TensorCalls(), name, dtype)
    assert is_refused(fault(), name, dtype)


def test_statistics_that_are_not_centred_are_refused() -> None:
    case = Case(SHAPES[-1], "planes", torch.float32)
    case.x.copy_(torch.randn(case.x.shape, generator=case.generator) * 0.05 + 50)
    CHECKS["batch_stats"](TensorCalls(), case)
    with pytest.raises(AssertionError, match="variance"):
        CHECKS["batch_stats"](NotCentred(), case)


def test_sums_that_are_overwritten_are_refused() -> None:
    """`act_backward_accumulate` adds to the sums of earlier tiles."""

    class Overwrites(TensorCalls):
        def act_backward_accumulate(
            self,
            grad_z: Tensor,
            x: Tensor,
            scale: Tensor,
            shift: Tensor,
            act: Activation,
            mean: Tensor,
            total: Tensor,
            sums: Tensor,
            sums_x: Tensor,
        ) -> None:
            sums.zero_()
            sums_x.zero_()
            super().act_backward_accumulate(grad_z, x, scale, shift, act, mean, total, sums, sums_x)

    with pytest.raises(AssertionError, match="sums"):
        check_act_backward_accumulate(Overwrites(), Case(SHAPES[-1], "rows", torch.float32))
