"""What follows the convolution of an SGConv layer, tile by tile: never both sides of an activation at once.

B batch, D = C * H channels, L length, O output channels before GLU, T positions of a tile
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels import alike
from lowtide.sequence_split import SequenceSplit
from lowtide.sgconv_form import LayerForm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda p: p,
}
# one tile fits the cores' L2 caches
TILE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Call:
    """Everything about one call that is not a tensor; it lives on the node."""

    form: LayerForm
    keep_preactivation: bool
    tile_bytes: int | None
    device_type: str
    autocast: bool
    autocast_dtype: torch.dtype
    split: SequenceSplit | None = None

    def pointwise_context(self) -> torch.autocast:
        """The autocast state of the forward, also in the backward."""
        return torch.autocast(self.device_type, self.autocast_dtype, enabled=self.autocast, cache_enabled=False)

    def convolution_context(self) -> torch.autocast:
        return torch.autocast(self.device_type, enabled=False)


def draw_mask(
    p_BDL: Tensor, form: LayerForm, split: SequenceSplit | None = None, replay: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(random state before the draw if it must be kept, bool mask in the layout of the output) of dropout.

    Whole channels are dropped alike on all ranks of a split sequence, single numbers by a generator per rank.
    """
    if form.linear or form.drop_rate == 0:
        return None, None
    B, D, L = p_BDL.shape
    shape = (B, D, 1 if form.drop_channels else L)
    if not form.transposed:
        shape = (B, shape[2], shape[1])
    device = p_BDL.device
    generator, state = None, None
    if replay is not None:
        generator = torch.Generator(device)
        generator.set_state(replay)
    elif split is not None and not form.drop_channels:
        generator = split.own_generator(device)
        state = generator.get_state()
    elif not form.drop_channels:
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    mask = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1.0 - form.drop_rate, generator=generator)
    if split is not None and form.drop_channels:
        split.agree_(mask)
    return state, mask


def tiles(B: int, D: int, L: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """Whole rows of the batch together where they are short, else stretches of one row."""
    row = max(1, D * itemsize)
    positions = max(1, TILE_BYTES // row)
    rows = max(1, positions // max(1, L))
    for b in range(0, B, rows):
        for t in range(0, L, min(positions, max(1, L))):
            yield slice(b, min(b + rows, B)), slice(t, min(t + positions, L))


def cut(x: Tensor | None, bs: slice, ts: slice, time_dim: int) -> Tensor | None:
    if x is None:
        return None
    rows = x[bs]
    return rows if rows.shape[time_dim] == 1 else rows.narrow(time_dim, ts.start, ts.stop - ts.start)


def pointwise_forward(
    p_BDL: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    valid: Tensor | None,
    mask: Tensor | None,
    call: Call,
) -> Tensor:
    """The layer's output; it takes the place of the pre-activation where that is not kept and has the same shape."""
    form = call.form
    if form.linear:
        if valid is not None:
            p_BDL.masked_fill_(~valid.unsqueeze(1), 0)
        return p_BDL if form.transposed else p_BDL.transpose(1, 2).contiguous()
    assert weight is not None
    B, D, L = p_BDL.shape
    out_channels = weight.shape[0] // (2 if form.postact == "glu" else 1)
    time_dim = 2 if form.transposed else 1
    with call.pointwise_context():
        dtype = pointwise(p_BDL[:0, :, :1], weight, bias, norm_weight, norm_bias, None, form).dtype
    if form.transposed and out_channels == D and dtype == p_BDL.dtype and not call.keep_preactivation:
        y = p_BDL
    else:
        y = p_BDL.new_empty((B, out_channels, L) if form.transposed else (B, L, out_channels), dtype=dtype)
    with call.pointwise_context():
        for bs, ts in alike(tiles(B, D, L, p_BDL.element_size())):
            part_mask = cut(mask, bs, ts, time_dim)
            part = pointwise(p_BDL[bs, :, ts], weight, bias, norm_weight, norm_bias, part_mask, form)
            if valid is not None:
                part.masked_fill_(~valid[bs, ts].unsqueeze(3 - time_dim), 0)
            y[bs].narrow(time_dim, ts.start, ts.stop - ts.start).copy_(part)
    return y


def pointwise(
    p_BDT: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mask: Tensor | None,
    form: LayerForm,
) -> Tensor:
    """Everything behind the convolution, for some positions: (B, D, T) -> (B, H, T), or (B, T, H)."""
    y = ACTIVATIONS[form.activation](p_BDT)
    if not form.transposed:
        y = y.transpose(1, 2)
    if mask is not None:
        y = y * (mask.to(y.dtype) / (1.0 - form.drop_rate))
    if form.norm_eps is not None:
        y = normalise(y, norm_weight, norm_bias, form)
    y = apply_map(y, weight, bias, form)
    return F.glu(y, dim=1 if form.transposed else 2) if form.postact == "glu" else y


def normalise(m: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, form: LayerForm) -> Tensor:
    """Layer norm over the channels."""
    assert form.norm_eps is not None
    channel_dim = 1 if form.transposed else 2
    rows = F.layer_norm(m.movedim(channel_dim, -1), (m.shape[channel_dim],), norm_weight, norm_bias, form.norm_eps)
    return rows.movedim(-1, channel_dim)


def apply_map(m: Tensor, weight: Tensor, bias: Tensor | None, form: LayerForm) -> Tensor:
    """weight m + bias over the channels."""
    if not form.transposed:
        return F.linear(m, weight, bias)
    offset = weight.new_zeros(()) if bias is None else bias.unsqueeze(-1)
    return torch.baddbmm(offset, weight.expand(m.shape[0], -1, -1), m)
