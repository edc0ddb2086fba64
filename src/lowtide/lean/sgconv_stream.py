"""The SGConv layer on a stream: the cascade, then activation, norm and output map of the samples that came."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.lean.sgconv_pointwise import pointwise
from lowtide.lean.streaming import StreamFilter, block_rows
from lowtide.sgconv_form import LayerForm
from lowtide.stream_state import State


@torch.no_grad()
def sgconv_block(
    u: Tensor,
    state: State,
    filter: StreamFilter,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    form: LayerForm,
) -> Tensor:
    """T samples of the layer, without dropout; the state is changed in place.

    Args:
        u: (T, B, H), any T.
        state, filter: of `lowtide.lean.streaming`, the skip term included.
        weight, bias, norm_weight, norm_bias: as `sgconv`.
        form: with transposed=False, as time and batch lie here.

    Returns:
        (T, B, O), or with form.linear (T, B, C*H). Output t is that of input t - filter.delay.
    """
    if torch.is_autocast_enabled(u.device.type):
        with torch.autocast(u.device.type, enabled=False):
            p_TBD = block_rows(u, state, filter).flatten(2)
    else:
        p_TBD = block_rows(u, state, filter).flatten(2)
    return sgconv_map(p_TBD, weight, bias, norm_weight, norm_bias, form=form)


@torch.no_grad()
def sgconv_map(
    p: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    form: LayerForm,
) -> Tensor:
    """Everything behind the convolution, without dropout: p (T, B, C*H) -> (T, B, O); form with transposed=False."""
    if form.linear:
        return p
    assert weight is not None
    assert not form.transposed
    return pointwise(p.transpose(1, 2), weight, bias, norm_weight, norm_bias, None, form)
