"""The layers of a dense block on one feature buffer: forward into it, backward out of it, no graph inside.

F (N, C, S), C = c0 + L*k, is written once: layer i reads channels [0, c_i) and writes [c_i, c_i + k). Per layer

    forward    z = relu(scale1 * F[:, :c] + shift1)          tile by tile, never whole
               h = W1 z                                      (N, b*k, S)
               F[:, c:c+k] = conv3x3(relu(scale2 * h + shift2))
    backward   da = conv3x3^T(dF[:, c:c+k]);  dh = batch norm 2 backward of da, in place;  dz = W1^T dh, per tile
               dF[:, :c] += scale1 * dz * relu'(z)
               and the rest of batch norm 1's backward, slope_c + offset_c * F_c, is summed over the layers as numbers
               and added once, when the channel's own gradient is needed

Two facts carry it. The moments of a feature channel are the same in every later norm1: they are taken once, when the
channel is written. And batch norm's correction is affine in its input, so it can wait.

Source: Huang et al. 2017, arXiv 1608.06993 (the block); Pleiss et al. 2017, arXiv 1707.06990 (memory shared between
layers); the deferred correction follows from Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide.kernels import Kernels, Normed, accumulation_dtype, alike, select
from lowtide.lean import dropout
from lowtide.lean.batch_norm import Affine, Moments, affine, batch_moments, correction, update_running
from lowtide.lean.maps import (
    Scratch,
    add_outer_,
    convolve,
    convolve_backward,
    image_tiles,
    in_form_of,
    is_rows,
    mix,
    mixed,
    new_map,
    position_tiles,
    tile_bytes,
)
from lowtide.parts import BatchNorm, Convolution, DenseLayer

# want(parameter slot or None) -> is its gradient asked for;  put(slot, gradient)
Want = Callable[[object], bool]
Put = Callable[[object, Tensor], None]


@dataclass
class Tools:
    """What every pass of one call shares: kernels, shapes, the dtype of the convolutions, scratch."""

    kernels: Kernels
    spatial: tuple[int, ...]
    dtype: torch.dtype
    scratch: Scratch
    budget: int
    bottleneck_rows: bool
    plain_rows: bool  # whether ordinary autograd would hold its maps in channels_last

    @classmethod
    def for_map(cls, features: Tensor, spatial: Sequence[int], dtype: torch.dtype, plain_rows: bool) -> Tools:
        rows = is_rows(features)
        return cls(
            select(features),
            tuple(spatial),
            dtype,
            Scratch(features, dtype, rows=rows),
            tile_bytes(features.device),
            rows or features.device.type == "cpu",
            plain_rows,
        )


@dataclass
class Statistics:
    """Moments of one forward: of the feature channels (one vector each over C), and of every bottleneck."""

    mean: Tensor
    var: Tensor
    bottleneck: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    count: float = 0.0

    def features(self, c: int) -> Moments:
        return Moments(self.mean[:c], self.var[:c], self.count)


@dataclass
class Corrections:
    """Sums over the consumers of F of batch norm's slope and offset, per feature channel."""

    slope: Tensor
    offset: Tensor
    pending: bool = False

    @classmethod
    def zeros(cls, features: Tensor) -> Corrections:
        vector = features.new_zeros(features.shape[1], dtype=accumulation_dtype(features))
        return cls(vector, vector.clone())

    def add(self, slope: Tensor | None, offset: Tensor | None) -> None:
        if slope is not None and offset is not None:
            c = len(slope)
            self.slope[:c] += slope
            self.offset[:c] += offset
            self.pending = True

    def settle(self, kernels: Kernels, grad: Tensor, features: Tensor, start: int, stop: int) -> None:
        """Add the correction to channels [start, stop) of the gradient: nobody reads them any more."""
        if self.pending:
            part = slice(start, stop)
            kernels.affine_add_(grad[:, part], None, features[:, part], self.slope[part], self.offset[part])


def forward_layers(
    tools: Tools,
    features: Tensor,
    layers: Sequence[DenseLayer],
    statistics: Statistics,
    random_states: dict[int, Tensor],
    *,
    first: bool,
    tail_norm: BatchNorm | None = None,
    keep: bool = False,
) -> list[Tensor]:
    """Fill channels c0.. of `features`; returns the bottleneck maps if `keep`.

    `first`: this is the forward itself, so moments and random states are taken and running statistics move. Otherwise
    it is a repetition: `statistics` and `random_states` are read, and nothing outside changes.
    """
    c = features.shape[1] - sum(layer.growth for layer in layers)
    norms: list[BatchNorm | None] = [*(layer.norm1 for layer in layers), tail_norm]
    uses_batch = [norm is not None and norm.uses_batch for norm in norms]
    if first:
        _take_moments(tools, features, statistics, 0, c, norms if any(uses_batch) else [])
    kept = bottleneck_maps(tools, features, layers) if keep else []
    h: Tensor | None = None
    for i, layer in enumerate(layers):
        k = layer.growth
        at1 = affine(layer.norm1, statistics.features(c), features)
        if first:
            update_running(layer.norm1, statistics.features(c))
        new = features[:, c : c + k]
        if layer.conv2 is None or layer.norm2 is None:
            grow(tools, features[:, :c], at1, layer.conv1, new)
        else:
            h = kept[i] if keep else bottleneck_map(tools, features, layer.conv1, h)
            bottleneck(tools, features[:, :c], at1, layer.conv1, h)
            if first:
                moments = Moments(h.new_empty(0), h.new_empty(0), statistics.count)
                if layer.norm2.uses_batch:
                    moments = batch_moments(tools.kernels, h, layer.norm2.reduce)
                    statistics.count = moments.size
                statistics.bottleneck.append((moments.mean, moments.var))
                update_running(layer.norm2, moments)
            grow(tools, h, bottleneck_affine(layer.norm2, statistics, i, h), layer.conv2, new)
        if layer.drop_rate > 0:
            if first:
                random_states[i] = dropout.random_state(features.device)
            mask = dropout.draw(layer, new, tools, random_states[i], replay=not first)
            new.mul_(mask)
        if first and any(uses_batch[i + 1 :]):
            _take_moments(tools, features, statistics, c, c + k, norms)
        c += k
    return kept


def _take_moments(
    tools: Tools, features: Tensor, statistics: Statistics, start: int, stop: int, norms: Sequence[BatchNorm | None]
) -> None:
    users = [norm for norm in norms if norm is not None and norm.uses_batch]
    if users:
        moments = batch_moments(tools.kernels, features[:, start:stop], users[0].reduce)
        statistics.mean[start:stop], statistics.var[start:stop] = moments.mean, moments.var
        statistics.count = moments.size


def bottleneck_map(tools: Tools, features: Tensor, conv: Convolution, reuse: Tensor | None) -> Tensor:
    """Memory for h: `reuse` if it has the right size."""
    n, _, s = features.shape
    width = conv.weight.shape[0]
    if reuse is not None and reuse.shape[1] == width:
        return reuse
    return new_map(features, n, width, s, rows=tools.bottleneck_rows, dtype=tools.dtype)


def bottleneck_maps(tools: Tools, features: Tensor, layers: Sequence[DenseLayer]) -> list[Tensor]:
    """Memory for the h of every layer that has one, in one piece: freed together, it leaves malloc no holes."""
    n, _, s = features.shape
    widths = [0 if layer.norm2 is None else layer.conv1.weight.shape[0] for layer in layers]
    whole = features.new_empty(n * s * sum(widths), dtype=tools.dtype)
    parts = whole.split([n * s * width for width in widths])
    return [
        part.view(n, s, width).transpose(1, 2) if tools.bottleneck_rows else part.view(n, width, s)
        for part, width in zip(parts, widths, strict=True)
        if width
    ]


def bottleneck_affine(norm: BatchNorm, statistics: Statistics, i: int, h: Tensor) -> Affine:
    mean, var = statistics.bottleneck[i]
    return affine(norm, Moments(mean, var, statistics.count), h)


def bottleneck(tools: Tools, x: Tensor, at: Affine, conv: Convolution, h: Tensor) -> None:
    """h = W1 relu(scale * x + shift), tile by tile. x (N, c, S), h (N, b*k, S)."""
    n, c, s = x.shape
    weight = _matrix(conv.weight, tools.dtype)
    if tools.kernels.fuses_mix(x, h):
        tools.kernels.norm_act_mix(x, at.scale, at.shift, weight, h)
    else:
        for images, positions in alike(position_tiles(n, s, c * weight.element_size(), tools.budget)):
            part = x[images, :, positions]
            z = tools.scratch("z", *part.shape, rows=tools.bottleneck_rows)
            tools.kernels.scale_shift_act(part, at.scale, at.shift, "relu", z)
            mix(weight, z, h[images, :, positions])
    if conv.bias is not None:
        h += conv.bias.detach().to(h.dtype)[:, None]


def grow(tools: Tools, x: Tensor, at: Affine, conv: Convolution, new: Tensor) -> None:
    """new = conv3x3(relu(scale * x + shift)), in one sweep or a few images at a time. x (N, c, S), new (N, k, S)."""
    n, c, s = x.shape
    weight = conv.weight.detach().to(tools.dtype)
    if conv.bias is None and tools.kernels.fuses_mix(x, new):
        tools.kernels.norm_act_conv(x, at.scale, at.shift, weight, tools.spatial, new)
        return
    bias = None if conv.bias is None else conv.bias.detach().to(tools.dtype)
    for images in alike(image_tiles(n, c * s * weight.element_size(), tools.budget)):
        part = x[images]
        a = tools.scratch("z", *part.shape, rows=is_rows(x))
        tools.kernels.scale_shift_act(part, at.scale, at.shift, "relu", a)
        new[images] = convolve(a, tools.spatial, weight, bias).flatten(2)


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype).flatten(1)


def backward_layers(
    tools: Tools,
    features: Tensor,
    grad: Tensor,
    layers: Sequence[DenseLayer],
    slots: Sequence[DenseLayer],
    statistics: Statistics,
    random_states: Mapping[int, Tensor],
    kept: Sequence[Tensor],
    corrections: Corrections,
    want: Want,
    put: Put,
    *,
    needs_input: bool,
) -> None:
    """From dF after all consumers of F outside the block, to dF of the first c0 channels, in place.

    `slots` mirrors `layers` with a slot for every tensor. Layers below the last wanted gradient are not visited.
    """
    wanted = [_any_wanted(slot, want) for slot in slots]
    lowest = 0 if needs_input else wanted.index(True) if any(wanted) else len(layers)
    c = features.shape[1]
    h: Tensor | None = None
    for i in range(len(layers) - 1, lowest - 1, -1):
        layer, slot, k = layers[i], slots[i], layers[i].growth
        c -= k
        corrections.settle(tools.kernels, grad, features, c, c + k)
        new = grad[:, c : c + k]
        if layer.drop_rate > 0:
            new.mul_(dropout.draw(layer, new, tools, random_states[i], replay=True))
        at1 = affine(layer.norm1, statistics.features(c), features)
        step = _LayerBackward(tools, features[:, :c], grad[:, :c], at1, statistics.count, corrections, want, put)
        needs_below = needs_input or i > lowest
        if layer.conv2 is None or layer.norm2 is None:
            step.plain_layer(layer, slot, new, needs_below)
            continue
        if kept:
            h = kept[i]
        else:
            h = bottleneck_map(tools, features, layer.conv1, h)
            bottleneck(tools, features[:, :c], at1, layer.conv1, h)
        step.bottleneck_layer(layer, slot, new, h, bottleneck_affine(layer.norm2, statistics, i, h), needs_below)


def _any_wanted(slot: DenseLayer, want: Want) -> bool:
    norms, convs = (slot.norm1, slot.norm2), (slot.conv1, slot.conv2)
    return any(want(part.weight) or want(part.bias) for part in (*norms, *convs) if part is not None)


@dataclass
class _LayerBackward:
    """Backward of one layer that read x = F[:, :c] through batch norm `at1`; adds to total = dF[:, :c]."""

    tools: Tools
    x: Tensor
    total: Tensor
    at1: Affine
    count: float
    corrections: Corrections
    want: Want
    put: Put

    def bottleneck_layer(
        self, layer: DenseLayer, slot: DenseLayer, new: Tensor, h: Tensor, at2: Affine, needs_below: bool
    ) -> None:
        assert layer.norm2 is not None
        assert slot.norm2 is not None
        assert layer.conv2 is not None
        assert slot.conv2 is not None
        needs_dz = needs_below or self._wants(slot.norm1)
        needs_dh = needs_dz or self._wants(slot.conv1)
        needs_da = needs_dh or self._wants(slot.norm2)
        tiles, sums, sums_x = self._through_conv3(layer.conv2, slot.conv2, new, h, at2, needs_da)
        if not needs_da:
            return
        fix2 = correction(layer.norm2, at2, sums, sums_x, self.count, needs_dh)
        self._put_norm(slot.norm2, fix2.dgamma, fix2.dbeta)
        if not needs_dh:
            return
        weight = _matrix(layer.conv1.weight, self.tools.dtype)
        acc = self.at1.scale.dtype
        dweight = torch.zeros_like(weight, dtype=acc) if self.want(slot.conv1.weight) else None
        dbias = weight.new_zeros(len(weight), dtype=acc) if self.want(slot.conv1.bias) else None
        sums1, sums1_x = self._vector_pair(self.x)
        weight_t = weight.t().contiguous()
        slope = fix2.slope if fix2.slope is not None else torch.zeros_like(sums)
        offset = fix2.offset if fix2.offset is not None else torch.zeros_like(sums)
        n_bytes = self.x.shape[1] * weight.element_size()
        while tiles:
            images, da = tiles.pop(0)
            x, total, h_part = self.x[images], self.total[images], h[images]
            if dbias is None and self.tools.kernels.fuses_mix(x, da):
                self.tools.kernels.norm_act_mix_backward(
                    da, x, self.at1.scale, self.at1.shift, self.at1.mean, weight,
                    normed=Normed(h_part, at2.scale, slope, offset),
                    total=total if needs_dz else None,
                    sums=sums1 if needs_dz else None,
                    sums_x=sums1_x if needs_dz else None,
                    dweight=dweight,
                )  # fmt: skip
                continue
            for sub, positions in alike(position_tiles(da.shape[0], da.shape[2], n_bytes, self.tools.budget)):
                dh = da[sub, :, positions]
                self.tools.kernels.affine_add_(dh, at2.scale, h_part[sub, :, positions], slope, offset)
                part = x[sub, :, positions]
                if dbias is not None:
                    dbias += dh.sum((0, 2), dtype=dbias.dtype)
                if dweight is not None:
                    z = self.tools.scratch("z", *part.shape, rows=self.tools.bottleneck_rows)
                    self.tools.kernels.scale_shift_act(part, self.at1.scale, self.at1.shift, "relu", z)
                    add_outer_(dweight, dh, z)
                if needs_dz:
                    dz = mixed(weight_t, dh, self.tools.scratch, "dz", rows=is_rows(self.x))
                    self._through_norm1(dz, part, total[sub, :, positions], sums1, sums1_x)
        if dweight is not None:
            self.put(slot.conv1.weight, dweight.view(layer.conv1.weight.shape))
        if dbias is not None:
            self.put(slot.conv1.bias, dbias)
        if needs_dz:
            self._finish_norm1(layer, slot, sums1, sums1_x, needs_below)

    def plain_layer(self, layer: DenseLayer, slot: DenseLayer, new: Tensor, needs_below: bool) -> None:
        """norm1 - relu - conv3x3 without bottleneck: the convolution's tile is all that exists."""
        needs_dz = needs_below or self._wants(slot.norm1)
        tiles = self._conv3_tiles(layer.conv1, slot.conv1, new, self.x, self.at1, needs_dz)
        sums, sums_x = self._vector_pair(self.x)
        for images, dz in tiles:
            if dz is not None:
                self._through_norm1(dz, self.x[images], self.total[images], sums, sums_x)
        if needs_dz:
            self._finish_norm1(layer, slot, sums, sums_x, needs_below)

    def _through_norm1(self, dz: Tensor, x: Tensor, total: Tensor, sums: Tensor, sums_x: Tensor) -> None:
        at = self.at1
        self.tools.kernels.act_backward_accumulate(dz, x, at.scale, at.shift, "relu", at.mean, total, sums, sums_x)

    def _finish_norm1(
        self, layer: DenseLayer, slot: DenseLayer, sums: Tensor, sums_x: Tensor, needs_below: bool
    ) -> None:
        fix = correction(layer.norm1, self.at1, sums, sums_x, self.count, needs_below)
        self.corrections.add(fix.slope, fix.offset)
        self._put_norm(slot.norm1, fix.dgamma, fix.dbeta)

    def _through_conv3(
        self, conv: Convolution, slot: Convolution, new: Tensor, h: Tensor, at2: Affine, needs_da: bool
    ) -> tuple[list[tuple[slice, Tensor]], Tensor, Tensor]:
        """da masked by relu, in tiles or whole, and its sums for batch norm 2."""
        kernels = self.tools.kernels
        if conv.bias is None and needs_da and kernels.fuses_mix(h, new):
            da = self.tools.scratch("da", *h.shape, rows=True)
            # neighbours in memory: the taps of one line are then gathered at once
            grad = self.tools.scratch("grad", *new.shape, rows=True)
            grad.copy_(new)
            weight = conv.weight.detach().to(self.tools.dtype)
            dweight = torch.zeros_like(weight, dtype=at2.scale.dtype) if self.want(slot.weight) else None
            sums, sums_x = kernels.norm_act_conv_backward(
                grad, h, at2.scale, at2.shift, at2.mean, weight, self.tools.spatial, masked=da, dweight=dweight
            )
            if dweight is not None:
                self.put(slot.weight, dweight)
            return [(slice(0, len(h)), da)], sums, sums_x
        sums, sums_x = self._vector_pair(h)
        tiles: list[tuple[slice, Tensor]] = []
        for images, da in self._conv3_tiles(conv, slot, new, h, at2, needs_da):
            if da is not None:
                part, part_x = self.tools.kernels.act_backward_sums_(
                    da, h[images], at2.scale, at2.shift, "relu", at2.mean
                )
                sums += part
                sums_x += part_x
                tiles.append((images, da))
        return tiles, sums, sums_x

    def _conv3_tiles(
        self, conv: Convolution, slot: Convolution, new: Tensor, x: Tensor, at: Affine, needs_input: bool
    ) -> Iterator[tuple[slice, Tensor | None]]:
        """Gradient by the convolution's input, tile by tile; its weight and bias gradients are put at the end."""
        n, c, s = x.shape
        weight = conv.weight.detach().to(self.tools.dtype)
        needs_weight = self.want(slot.weight)
        dweight = torch.zeros_like(weight, dtype=at.scale.dtype) if needs_weight else None
        dbias = weight.new_zeros(len(weight), dtype=at.scale.dtype) if self.want(slot.bias) else None
        if not (needs_input or needs_weight or dbias is not None):
            return
        for images in image_tiles(n, c * s * weight.element_size(), self.tools.budget):
            part = x[images]
            rows = is_rows(x)
            grad = self.tools.scratch("grad", part.shape[0], new.shape[1], s, rows=rows)
            grad.copy_(new[images])
            if dbias is not None:
                dbias += grad.sum((0, 2), dtype=dbias.dtype)
            a = self.tools.scratch("z", *part.shape, rows=rows)
            if needs_weight:
                self.tools.kernels.scale_shift_act(part, at.scale, at.shift, "relu", a)
            da, dw = convolve_backward(grad, a, self.tools.spatial, weight, (needs_input, needs_weight))
            if dweight is not None and dw is not None:
                dweight += dw
            yield images, None if da is None else in_form_of(a, da)
        if dweight is not None:
            self.put(slot.weight, dweight)
        if dbias is not None:
            self.put(slot.bias, dbias)

    def _wants(self, slot: BatchNorm | Convolution) -> bool:
        return self.want(slot.weight) or self.want(slot.bias)

    def _put_norm(self, slot: BatchNorm, dgamma: Tensor, dbeta: Tensor) -> None:
        if self.want(slot.weight):
            self.put(slot.weight, dgamma)
        if self.want(slot.bias):
            self.put(slot.bias, dbeta)

    def _vector_pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        vector = x.new_zeros(x.shape[1], dtype=self.at1.scale.dtype)
        return vector, vector.clone()
