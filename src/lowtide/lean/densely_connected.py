"""A chain x <- cat([f_i(x), x]) with any f_i: one buffer of features, and each f_i run again in backward.

    F = [x, f_0(F[:c_0]), f_1(F[:c_1]), ...], or from back to front, written once: no concatenation
    backward, last layer first: with g_i the gradient of f_i's channels,
        dF[:c_i] += (df_i/dx)^T g_i,   dtheta_i = (df_i/dtheta)^T g_i      from f_i run again on F[:c_i]

Saved (bytes; "channel" = N * S * itemsize):
    "pointwise", "layer"   (c0 + sum k_i) channels      the features, which are the output
    "block"                c0 channels                  the input
    and per layer that draws random numbers one generator state, per buffer that a run changed its old value (running
    statistics of norms in training excepted, since their output does not depend on it). Plain autograd keeps every
    concatenation, quadratic in the number of layers, and all that the f_i keep.
Recomputed: each f_i once ("block": twice), one at a time, under the forward's random state, autocast and training
    flags. Buffers move once, in the forward. Forward hooks inside an f_i run in every run of it.
Exactness: the f_i's own operators on the same values.
Raises: ArgumentError for an f_i whose output does not fit; UnsupportedError for double backward, and for an f_i that
    changes its input in place or trains tensors that are not its parameters.
Source: Huang et al. 2017, arXiv 1608.06993, section 3; Pleiss et al. 2017, arXiv 1707.06990 (shared storage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.lean.maps import is_channels_last, new_images
from lowtide.lean.replay import Autocast, Recording, check_closed, parameters_of, record, replay
from lowtide.lean.segment import refuse_double_backward
from lowtide.levels import Level

_WHERE = "densely connected layers"


def densely_connected(
    x: Tensor,
    layers: Sequence[nn.Module],
    *,
    new_first: bool = True,
    recompute: Level = "layer",
    growths: list[int] | None = None,
) -> Tensor:
    """x (N, c0, *S) -> (N, c0 + sum of k_i, *S); see the module's text for what is saved.

    Args:
        layers: f_i: (N, c_i, *S) -> (N, k_i, *S), with c_i = c0 + k_0 + ... + k_(i-1).
        new_first: x <- cat([f_i(x), x]); otherwise cat([x, f_i(x)]).
        recompute: "pointwise" or "layer" (the same here), or "block".
        growths: the k_i if they are known; filled in if it is empty. Unknown, the buffer grows by copies.
    """
    names = [parameters_of(layer) for layer in layers]
    parameters = list({id(p): p for layer in names for p in layer.values()}.values())
    order = {id(p): place for place, p in enumerate(parameters)}
    places = tuple({name: order[id(p)] for name, p in layer.items()} for layer in names)
    autocast = Autocast.now(x.device.type)
    call = _Call(tuple(layers), places, new_first, recompute == "block", autocast, is_channels_last(x))
    growths = growths if growths is not None else []
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
        return _DenselyConnected.apply(call, growths, x, *parameters)
    with torch.no_grad():
        return _forward(call, growths, x, [])[0]


@dataclass(frozen=True)
class _Call:
    layers: tuple[nn.Module, ...]
    # per layer the names of its parameters and their places among all; by name, since tensors that were kept may come
    # back as other objects (a checkpoint around the chain, offloading)
    places: tuple[dict[str, int], ...]
    new_first: bool
    keeps_input: bool
    autocast: Autocast
    channels_last: bool

    def old(self, features: Tensor, channels: int) -> Tensor:
        """The `channels` channels that were there before a layer, as the layer reads them."""
        total = features.shape[1]
        part = features[:, total - channels :] if self.new_first else features[:, :channels]
        if not self.channels_last:
            return part.contiguous()
        return part.contiguous(memory_format=torch.channels_last if part.dim() == 4 else torch.channels_last_3d)

    def new(self, features: Tensor, channels: int, growth: int) -> Tensor:
        """The channels that a layer added to the `channels` before it, in place."""
        total = features.shape[1]
        start = total - channels - growth if self.new_first else channels
        return features[:, start : start + growth]

    def resized(self, features: Tensor, channels: int, capacity: int) -> Tensor:
        """A copy with room for `capacity` channels, `channels` of them filled."""
        shape = (len(features), capacity, *features.shape[2:])
        larger = new_images(features, shape, channels_last=self.channels_last, dtype=features.dtype)
        self.new(larger, 0, channels).copy_(self.new(features, 0, channels))
        return larger


def _forward(call: _Call, growths: list[int], x: Tensor, saved: list[Tensor]) -> tuple[Tensor, list[Recording]]:
    """The features and how each layer was run."""
    if len(growths) != len(call.layers):
        growths.clear()
    known = list(growths)
    growths.clear()
    recordings: list[Recording] = []
    features, channels = x, x.shape[1]
    for i, layer in enumerate(call.layers):
        with call.autocast.again():
            out, recording = record(layer, call.old(features, channels) if i else x, saved)
        _check_output(out, x, i)
        recordings.append(recording)
        growth = out.shape[1]
        growths.append(growth)
        if i == 0:
            dtype = torch.promote_types(x.dtype, out.dtype)
            features = call.resized(x.to(dtype), channels, channels + (sum(known) or growth))
        elif torch.promote_types(features.dtype, out.dtype) != features.dtype:
            raise UnsupportedError(
                describe(expected=f"layer {i} to return {features.dtype}", got=str(out.dtype), where=_WHERE)
            )
        if features.shape[1] < channels + growth:
            features = call.resized(features, channels, channels + growth)
        call.new(features, channels, growth).copy_(out)
        channels += growth
    if features.shape[1] != channels:  # other sizes than last time
        features = call.resized(features, channels, channels)
    return features, recordings


def _check_output(out: Any, x: Tensor, i: int) -> None:
    if isinstance(out, Tensor) and (out.shape[:1], out.shape[2:]) == (x.shape[:1], x.shape[2:]):
        return
    got = f"{tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    expected = f"layer {i} to return new channels of the size of its map {tuple(x.shape)}"
    raise ArgumentError(describe(expected=expected, got=got, where=_WHERE))


class _DenselyConnected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, growths: list[int], x: Tensor, *parameters: Tensor) -> Tensor:
        saved: list[Tensor] = []
        features, recordings = _forward(call, growths, x, saved)
        ctx.call, ctx.recordings, ctx.growths, ctx.count = call, recordings, tuple(growths), len(parameters)
        ctx.x_dtype, ctx.x_channels = x.dtype, x.shape[1]
        ctx.save_for_backward(x if call.keeps_input else features, *parameters, *saved)
        return features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_WHERE)
        call: _Call = ctx.call
        base, *rest = ctx.saved_tensors
        saved = rest[ctx.count :]
        features = _features_again(ctx, base, saved) if call.keeps_input else base
        needs_input, *needs = ctx.needs_input_grad[2:]
        sums: list[Tensor | None] = [None] * ctx.count
        total = new_images(features, features.shape, channels_last=call.channels_last, dtype=features.dtype)
        total.copy_(grads[0])
        channels = features.shape[1]
        for i in reversed(range(len(call.layers))):
            layer, growth = call.layers[i], ctx.growths[i]
            channels -= growth
            needs_old = i > 0 or needs_input
            x = call.old(features, channels).detach()
            if i == 0:
                x = x.to(ctx.x_dtype)
            x.requires_grad_(needs_old)
            out, stand_ins = replay(layer, x, ctx.recordings[i], saved, call.autocast)
            places = call.places[i]
            wanted = {name: p for name, p in stand_ins.items() if needs[places[name]]}
            check_closed(out, [x, *stand_ins.values()], _WHERE)
            inputs = [*([x] if needs_old else []), *wanted.values()]
            if not out.requires_grad or not inputs:
                continue
            grad_new = call.new(total, channels, growth).to(out.dtype)
            found = list(torch.autograd.grad(out, inputs, grad_new, allow_unused=True))
            del out
            if needs_old:
                dx = found.pop(0)
                if dx is not None:
                    call.new(total, 0, channels).add_(dx)
            for name, grad in zip(wanted, found, strict=True):
                place = places[name]
                if grad is not None:
                    known = sums[place]
                    sums[place] = grad if known is None else known + grad
        dx = call.new(total, 0, ctx.x_channels).to(ctx.x_dtype, copy=True) if needs_input else None
        return None, None, dx, *sums


def _features_again(ctx: Any, x: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """Level "block": the features from the input, touching no buffer and no generator."""
    call: _Call = ctx.call
    channels = x.shape[1]
    features: Tensor | None = None
    for i, (layer, growth) in enumerate(zip(call.layers, ctx.growths, strict=True)):
        with torch.no_grad():
            read = x if features is None else call.old(features, channels)
            out = replay(layer, read, ctx.recordings[i], saved, call.autocast, graph=False)[0]
            if features is None:
                dtype = torch.promote_types(x.dtype, out.dtype)
                features = call.resized(x.to(dtype), channels, channels + sum(ctx.growths))
            call.new(features, channels, growth).copy_(out)
        channels += growth
    assert features is not None
    return features
