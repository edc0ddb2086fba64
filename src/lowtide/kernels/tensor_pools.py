"""The passes with a pool as plain tensor calls: every device, every floating dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TensorPools:
    """Part of the provider "tensor"."""

    def fuses_pool(self, x: Tensor) -> bool:
        return False

    def norm_act_max_pool(self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor) -> None:
        out.copy_(_max_pool(_activated(x, scale, shift), spatial)[0])

    def norm_act_max_pool_sums(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        choice: Tensor,
    ) -> tuple[Tensor, Tensor]:
        pooled, taken = _max_pool(_activated(x, scale, shift), spatial)
        stopped = pooled <= 0
        m = grad.to(scale.dtype).masked_fill(stopped, 0)
        choice.copy_(taken.masked_fill(stopped, -1))
        centred = x.gather(2, taken).to(scale.dtype) - mean[:, None]
        sums = (v.sum(2, dtype=scale.dtype).sum(0, dtype=torch.float64).to(scale.dtype) for v in (m, m * centred))
        return next(sums), next(sums)

    def norm_act_max_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        choice: Tensor,
        scale: Tensor,
        slope: Tensor,
        offset: Tensor,
        spatial: Sequence[int],
        out: Tensor,
    ) -> None:
        m = (grad.to(scale.dtype) * scale[:, None]).masked_fill(choice < 0, 0)
        result = (x * slope[:, None]).add_(offset[:, None])
        out.copy_(result.scatter_add_(2, choice.long().clamp_min_(0), m))

    def norm_act_average_pool(
        self, x: Tensor, scale: Tensor, shift: Tensor, spatial: Sequence[int], out: Tensor
    ) -> None:
        grid, window = _on_grid(_activated(x, scale, shift), spatial), _window(spatial, 2)
        pool = torch.nn.functional.avg_pool3d if grid.dim() == 5 else torch.nn.functional.avg_pool2d
        out.copy_(pool(grid, window, window).flatten(2))

    def norm_act_average_pool_backward(
        self,
        grad: Tensor,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        spatial: Sequence[int],
        total: Tensor | None,
        sums: Tensor,
        sums_x: Tensor,
    ) -> None:
        z = (x * scale[:, None]).add_(shift[:, None])
        grid, window = _on_grid(z, spatial), _window(spatial, 2)
        aten = torch.ops.aten
        backward = aten.avg_pool3d_backward if grid.dim() == 5 else aten.avg_pool2d_backward
        pooled = [size // step for size, step in zip(grid.shape[2:], window, strict=True)]
        by_output = grad.to(z.dtype).unflatten(2, pooled)
        dz = backward(by_output, grid, window, window, [0] * len(window), False, True, None).flatten(2)
        m = dz.masked_fill(z <= 0, 0)
        sums += m.sum(2).sum(0, dtype=torch.float64).to(sums.dtype)
        sums_x += (m * (x - mean[:, None])).sum(2).sum(0, dtype=torch.float64).to(sums.dtype)
        if total is not None:
            total += m.mul_(scale[:, None])


def _activated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x * scale[:, None]).add_(shift[:, None]).relu_()


def _on_grid(x: Tensor, spatial: Sequence[int]) -> Tensor:
    """(N, C, S) on its grid; one spatial axis becomes (1, S)."""
    return x.unflatten(2, (1, *spatial) if len(spatial) == 1 else tuple(spatial))


def _window(spatial: Sequence[int], size: int, other: int = 1) -> list[int]:
    """`size` along every axis, `other` along the one that `_on_grid` adds."""
    return [other, size] if len(spatial) == 1 else [size] * len(spatial)


def _max_pool(z: Tensor, spatial: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Values and positions, both (N, C, S2)."""
    grid = _on_grid(z, spatial)
    aten = torch.ops.aten
    pool = aten.max_pool3d_with_indices if grid.dim() == 5 else aten.max_pool2d_with_indices
    values, taken = pool(grid, _window(spatial, 3), _window(spatial, 2), _window(spatial, 1, other=0))
    return values.flatten(2), taken.flatten(2)
