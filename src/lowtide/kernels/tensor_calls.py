"""The passes as plain tensor calls: every device, every floating dtype; what the other providers must reproduce.

Half-precision maps are computed in float32 and rounded once. Where the obvious call is not the fast one on the CPU, a
comment says what was found instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.kernels.interface import Activation, Normed
from lowtide.kernels.tensor_pools import TensorPools

# A float64 copy of this many elements is 1 MiB: one tile of `batch_stats`.
_STATS_TILE_NUMEL = 1 << 17


class TensorCalls(TensorPools):
    """Provider "tensor"."""

    name = "tensor"

    def supports(self, x: Tensor) -> bool:
        return x.is_floating_point()

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n_images, n_channels, n_positions = x.shape
        count = n_images * n_positions
        total = x.new_zeros(n_channels, dtype=torch.float64)
        squares = torch.zeros_like(total)
        step = max(1, _STATS_TILE_NUMEL // max(1, n_channels * n_positions))
        for tile in x.split(step) if n_images else ():
            total += tile.to(torch.float64).sum((0, 2))
        mean = total / count
        for tile in x.split(step) if n_images else ():
            squares += (tile.to(torch.float64) - mean[:, None]).square_().sum((0, 2))
        dtype = accumulation_dtype(x)
        return mean.to(dtype), (squares / count).to(dtype)

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        z = _scale_shift(x, scale, shift, out if out.dtype == scale.dtype else None)
        if act == "relu":
            z.relu_()
        if z is not out:
            out.copy_(z)

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        if act == "relu":
            _mask_(grad, x, scale, shift)
        return _sums(grad, x, mean)

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
        masked = grad_z.to(scale.dtype, copy=True)
        if act == "relu":
            _mask_(masked, x, scale, shift)
        grad_sum, grad_sum_x = _sums(masked, x, mean)
        sums += grad_sum
        sums_x += grad_sum_x
        # two calls: addcmul with a broadcast inner dimension is not vectorised
        masked *= scale[:, None]
        total += masked

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        correction = _scale_shift(x, slope, offset)
        if scale is None:
            grad += correction
        elif grad.dtype == scale.dtype:
            grad *= scale[:, None]
            grad += correction
        else:
            correction += grad * scale[:, None]
            grad.copy_(correction)

    def fuses_mix(self, x: Tensor, out: Tensor) -> bool:
        return False

    def norm_act_mix(self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, out: Tensor) -> None:
        z = _scale_shift(x, scale, shift).relu_().to(weight.dtype)
        out.copy_(_mix(weight, z))

    def norm_act_mix_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        weight: Tensor,
        *,
        normed: Normed | None,
        total: Tensor | None,
        sums: Tensor | None,
        sums_x: Tensor | None,
        dweight: Tensor | None,
    ) -> None:
        if normed is not None:
            self.affine_add_(grad, normed.scale, normed.y, normed.slope, normed.offset)
        grad = grad.to(weight.dtype)
        if dweight is not None:
            z = _scale_shift(x, scale, shift).relu_().to(weight.dtype)
            dweight += torch.einsum("nks,ncs->kc", grad, z)
        if sums is None or sums_x is None:
            return
        dz = _mix(weight.t(), grad)
        if total is None:
            more, more_x = self.act_backward_sums_(dz, x, scale, shift, "relu", mean)
            sums += more
            sums_x += more_x
        else:
            self.act_backward_accumulate(dz, x, scale, shift, "relu", mean, total, sums, sums_x)

    def norm_act_conv(
        self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        z = _scale_shift(x, scale, shift).relu_().to(weight.dtype).unflatten(2, tuple(spatial))
        out.copy_(torch.convolution(z, weight, None, *_same_size(weight)).flatten(2))

    def norm_act_conv_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        weight: Tensor,
        spatial: Sequence[int],
        *,
        masked: Tensor | None,
        dweight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        z = _scale_shift(x, scale, shift).relu_().to(weight.dtype).unflatten(2, tuple(spatial))
        by_output = grad.to(weight.dtype).unflatten(2, tuple(spatial))
        needs = [masked is not None, dweight is not None, False]
        dz, dw, _ = torch.ops.aten.convolution_backward(by_output, z, weight, None, *_same_size(weight), needs)
        if dweight is not None:
            dweight += dw
        if masked is None:
            zeros = torch.zeros_like(scale)
            return zeros, zeros.clone()
        masked.copy_(dz.flatten(2))
        return self.act_backward_sums_(masked, x, scale, shift, "relu", mean)


def _same_size(weight: Tensor) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
    """Stride, padding, dilation, transposed, output padding and groups of a convolution that keeps the size."""
    ones = [1] * (weight.dim() - 2)
    return ones, [size // 2 for size in weight.shape[2:]], ones, False, [0] * len(ones), 1


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The dtype of per-channel vectors beside a map like `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scale_shift(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """scale * x + shift in the vectors' dtype. Two calls: addcmul does not vectorise over a broadcast inner axis."""
    # a result that is allocated by the product has the form of x, planes or rows
    z = x * scale[:, None] if out is None else torch.mul(x, scale[:, None], out=out)
    return z.add_(shift[:, None])


def _mix(weight: Tensor, x: Tensor) -> Tensor:
    """weight (K, C) times the channels of x (N, C, S), in the form of x: (N, K, S)."""
    if x.stride(1) == 1 and x.shape[2] > 1:
        return (x.transpose(1, 2) @ weight.t()).transpose(1, 2)
    return weight @ x


def _mask_(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> None:
    """In place grad = 0 where scale * x + shift <= 0 (a NaN lets the gradient through, as autograd's relu does)."""
    z = _scale_shift(x, scale, shift)
    if grad.dtype == z.dtype:
        torch.ops.aten.threshold_backward.grad_input(grad, z, 0, grad_input=grad)
    else:
        grad.masked_fill_(z <= 0, 0)


def _sums(grad: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """sum(grad) and sum(grad * (x - mean)) per channel. Centred before the product: a large mean would cancel."""
    product = x - mean[:, None]
    product *= grad
    # over the positions first: the inner, contiguous sum is cascaded, and few numbers remain for float64
    total = grad.sum(2, dtype=mean.dtype).sum(0, dtype=torch.float64)
    return total.to(mean.dtype), product.sum(2).sum(0, dtype=torch.float64).to(mean.dtype)
