"""The backward of what follows the convolution of an SGConv layer, tile by tile, each tile's forward run once more.

B batch, D = C * H channels, L length, O output channels before GLU, T positions of a tile; m is the map's input
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels import alike
from lowtide.lean.sgconv_pointwise import ACTIVATIONS, Call, apply_map, cut, normalise, tiles

aten: Any = torch.ops.aten
# (gradient of the result, argument, result) -> gradient of the argument
DERIVATIVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gelu": lambda grad, p, a: aten.gelu_backward(grad, p),
    "relu": lambda grad, p, a: aten.threshold_backward(grad, a, 0),
    "silu": lambda grad, p, a: aten.silu_backward(grad, p),
    "tanh": lambda grad, p, a: aten.tanh_backward(grad, a),
    "sigmoid": lambda grad, p, a: aten.sigmoid_backward(grad, a),
    "identity": lambda grad, p, a: grad,
}


def pointwise_backward(
    p_BDL: Tensor,
    dy: Tensor,
    dp_BDL: Tensor | None,
    parameters: Sequence[Tensor | None],
    need: Sequence[bool],
    valid: Tensor | None,
    mask: Tensor | None,
    call: Call,
) -> list[Tensor | None]:
    """Write dp (it may be p's own memory) and return the gradients of weight, bias and the norm's two."""
    B, D, L = p_BDL.shape
    time_dim = 2 if call.form.transposed else 1
    totals = [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if x is not None and needed else None
        for x, needed in zip(parameters, need, strict=True)
    ]
    for bs, ts in alike(tiles(B, D, L, p_BDL.element_size())):
        dpart = dy[bs].narrow(time_dim, ts.start, ts.stop - ts.start)
        if valid is not None:
            dpart = dpart.masked_fill(~valid[bs, ts].unsqueeze(3 - time_dim), 0)
        dp = _tile(p_BDL[bs, :, ts], dpart, parameters, totals, cut(mask, bs, ts, time_dim), dp_BDL is not None, call)
        if dp is not None and dp_BDL is not None:
            dp_BDL[bs, :, ts].copy_(dp)
    return [None if t is None or x is None else t.to(x.dtype) for t, x in zip(totals, parameters, strict=True)]


def _tile(
    p_BDT: Tensor,
    dy: Tensor,
    parameters: Sequence[Tensor | None],
    totals: Sequence[Tensor | None],
    mask: Tensor | None,
    need_p: bool,
    call: Call,
) -> Tensor | None:
    """Add this tile's part of the parameters' gradients to `totals`; return dp (b, D, T)."""
    form = call.form
    weight, bias, norm_weight, norm_bias = parameters
    dweight, dbias, dnorm_weight, dnorm_bias = totals
    assert weight is not None
    a = ACTIVATIONS[form.activation](p_BDT)
    m = a if form.transposed else a.transpose(1, 2)
    scale = None if mask is None else mask.to(m.dtype) / (1.0 - form.drop_rate)
    dropped = m if scale is None else m * scale
    with call.pointwise_context():
        m = dropped if form.norm_eps is None else normalise(dropped, norm_weight, norm_bias, form)
        if form.postact == "glu":
            dy = aten.glu_backward(dy, apply_map(m, weight, bias, form), 1 if form.transposed else 2)
    dm = _map_backward(m.to(dy.dtype), dy, weight.to(dy.dtype), dweight, dbias, form.transposed)
    dm = dm.to(m.dtype)
    if form.norm_eps is not None:
        channel_dim = 1 if form.transposed else 2
        rows, drows = dropped.movedim(channel_dim, -1).to(m.dtype), dm.movedim(channel_dim, -1)
        drows = _norm_backward(rows, drows, norm_weight, norm_bias, dnorm_weight, dnorm_bias, form.norm_eps)
        dm = drows.movedim(-1, channel_dim).to(dropped.dtype)
    if not need_p:
        return None
    da = dm if scale is None else dm * scale
    return DERIVATIVES[form.activation](da if form.transposed else da.transpose(1, 2), p_BDT, a)


def _map_backward(
    m: Tensor, dy: Tensor, weight: Tensor, dweight: Tensor | None, dbias: Tensor | None, transposed: bool
) -> Tensor:
    """dm of y = weight m + bias; adds dy m^T to dweight and the sum of dy to dbias."""
    if dweight is not None:
        if transposed:
            dweight += torch.bmm(dy, m.transpose(1, 2)).sum(0)
        else:
            dweight += dy.flatten(0, 1).t() @ m.flatten(0, 1)
    if dbias is not None:
        dbias += dy.sum((0, 2) if transposed else (0, 1), dtype=dbias.dtype)
    return torch.bmm(weight.t().expand(dy.shape[0], -1, -1), dy) if transposed else dy @ weight


def _norm_backward(
    rows: Tensor,
    drows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    eps: float,
) -> Tensor:
    shape, rows = (rows.shape[-1],), rows.contiguous()
    _, mean, rstd = aten.native_layer_norm(rows, shape, weight, bias, eps)
    need = [True, dweight is not None, dbias is not None]
    dx, dw, db = aten.native_layer_norm_backward(drows.contiguous(), rows, shape, mean, rstd, weight, bias, need)
    if dweight is not None:
        dweight += dw
    if dbias is not None:
        dbias += db
    return dx
