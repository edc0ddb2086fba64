"""The few fused passes that the lean functions call; what each provider must do.

    N images, C channels, S positions (spatial axes flattened). A map is (N, C, S) in one of two forms, with any strides
    on the other axes (a slice of a wider buffer is the common case):
      planes: the positions of a channel are neighbours, stride(2) == 1 (NCHW);
      rows: the channels of a position are neighbours, stride(1) == 1 (channels last: x_NSC.transpose(1, 2)).
    The maps of one call share a form; `scale_shift_act` alone may read planes and write rows.
    Vectors are (C,), contiguous, in the accumulation dtype: float64 for float64 maps, float32 otherwise. Sums and
    statistics are accumulated so that their error does not grow with N*S (pairwise, blocked or in float64), whatever
    the map's dtype. The maps of one call are all float64, or each is float32, bfloat16 or float16.

A provider computes the same values as `tensor_calls` within rounding; it never falls back in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from lowtide.kernels.pools import Pools

Activation = Literal["identity", "relu"]


class Normed(NamedTuple):
    """The gradient by a map y whose norm's backward is still to be done: scale * grad + slope * y + offset."""

    y: Tensor
    scale: Tensor
    slope: Tensor
    offset: Tensor


class Kernels(Pools, Protocol):
    """One provider of the passes. `name` is what LOWTIDE_KERNELS selects."""

    name: str

    def supports(self, x: Tensor) -> bool:
        """Whether this provider can run on a map of this device and dtype."""
        ...

    def batch_stats(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per channel over N and S: two vectors (C,)."""
        ...

    def scale_shift_act(self, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, out: Tensor) -> None:
        """out = act(scale * x + shift), per channel. `out` has x's shape; its dtype may differ; it may be x itself."""
        ...

    def act_backward_sums_(
        self, grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, act: Activation, mean: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In place grad *= act'(scale * x + shift); returns sum(grad) and sum(grad * (x - mean)) per channel."""
        ...

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
        """With m = grad_z * act'(scale * x + shift), grad_z untouched:
        total += scale * m; sums += sum(m); sums_x += sum(m * (x - mean))."""
        ...

    def affine_add_(self, grad: Tensor, scale: Tensor | None, x: Tensor, slope: Tensor, offset: Tensor) -> None:
        """In place grad = scale * grad + slope * x + offset per channel (scale None: 1)."""
        ...

    def fuses_mix(self, x: Tensor, out: Tensor) -> bool:
        """Whether the `norm_act_*` passes take these maps in one sweep, with no temporary of the size of a map.

        Otherwise they should be given small tiles.
        """
        ...

    def norm_act_mix(self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (N, K, S) = weight (K, C) times relu(scale * x + shift), x (N, C, S): norm, relu and 1x1 convolution."""
        ...

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
        """Backward of `norm_act_mix` by g = grad (N, K, S), or what `normed` makes of grad; grad may be overwritten.

        With m = (weight^T g) * relu'(scale * x + shift):
            total += scale * m; sums += sum(m); sums_x += sum(m * (x - mean));
            dweight (K, C) += sum over images and positions of g times relu(scale * x + shift).
        Each may be None, not to be computed; total needs sums. dweight is in the accumulation dtype.
        """
        ...

    def norm_act_conv(
        self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        """out (N, K, S) = convolution of relu(scale * x + shift), x (N, C, S), S = the positions of `spatial`.

        weight (K, C, *kernel), odd kernel sizes, stride 1, padding kernel // 2: the size stays.
        """
        ...

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
        """Backward of `norm_act_conv` by grad (N, K, S). With m the gradient by scale * x + shift:

        masked (N, C, S) = m; returns sum(m) and sum(m * (x - mean)), zeros if masked is None;
        dweight += the gradient by the weight, in the accumulation dtype. None: not asked for.
        """
        ...
