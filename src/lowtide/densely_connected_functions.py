"""A chain x <- cat([f_i(x), x]): plain (`lowtide.reference`) or lean (`lowtide.lean`), chosen by `recompute`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lowtide.lean import densely_connected as lean
from lowtide.levels import Level, check_level
from lowtide.reference import densely_connected as plain


def densely_connected(
    x: Tensor,
    layers: Sequence[nn.Module],
    *,
    new_first: bool = True,
    recompute: Level = "pointwise",
    growths: list[int] | None = None,
) -> Tensor:
    """x (N, c0, *S) -> (N, c0 + sum of k_i, *S), by x <- cat([f_i(x), x]), or cat([x, f_i(x)]) unless `new_first`.

    Args:
        x: floating-point map (N, c0, *S).
        layers: f_i, each from (N, c_i, *S) to (N, k_i, *S).
        new_first: whether an f_i's channels come before or after those that it read.
        recompute: memory level; "pointwise" and "layer" do the same.
        growths: a list that keeps the k_i between calls, so that the buffer can be made at once.

    Saved, recomputed, exactness, errors: `lowtide.lean.densely_connected`.
    """
    if check_level(recompute, "densely_connected") == "none":
        return plain.densely_connected(x, layers, new_first=new_first)
    return lean.densely_connected(x, layers, new_first=new_first, recompute=recompute, growths=growths)
