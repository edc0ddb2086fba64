"""A dense block, alone or with the transition or head that follows it, as one autograd node.

Saved (bytes; "channel" = N * S * itemsize, S the block's positions):
    "pointwise"   (c0 + L*k + L*b*k) channels      the feature buffer, and every bottleneck map
    "layer"       (c0 + L*k) channels              the feature buffer
    "block"       c0 channels                      the input
    and at every level 2 (c0 + L*k) + 2 L*b*k vector elements (float64 for float64 maps, else float32) in training, and
    one random state per layer with dropout. The parameters are saved too, as by any operation.
Recomputed: activations and concatenations; at "layer" also the bottleneck maps; at "block" also the features. No
    moment is taken and no buffer is touched a second time.
Exactness: the plain network's values and gradients within rounding; running statistics and random numbers alike.
Raises: ArgumentError for maps that do not fit the layers; UnsupportedError for double backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.kernels import accumulation_dtype
from lowtide.lean.batch_norm import affine as norm_affine
from lowtide.lean.batch_norm import check_count, update_running
from lowtide.lean.dense_block import Corrections, Statistics, Tools, backward_layers, forward_layers
from lowtide.lean.maps import is_channels_last, is_rows, new_images, new_map
from lowtide.lean.transition import head_backward, head_forward, transition_backward, transition_forward
from lowtide.levels import Level
from lowtide.parts import BatchNorm, Convolution, DenseLayer, Head, Slot, Transition, fill, norms_of, take_tensors

Parts = tuple[tuple[DenseLayer, ...], Transition | Head | None]


@dataclass(frozen=True)
class Call:
    """Everything about one call that is not a tensor; it lives on the node."""

    template: Parts
    level: Level
    dtype: torch.dtype  # of the convolutions: the weights', or autocast's
    map_dtype: torch.dtype
    channels_last: bool  # the order of the output
    channels_last_input: bool


def dense_block(
    x: Tensor,
    layers: Sequence[DenseLayer],
    tail: Transition | Head | None = None,
    *,
    recompute: Level = "layer",
    channels_last: bool | None = None,
) -> Tensor:
    """x (N, c0, *S) -> (N, c0 + L*k, *S), or what the tail makes of it; see the module's text for what is saved.

    Args:
        x: floating-point map with one, two or three spatial axes, contiguous or channels_last.
        layers: in order; layer i takes c0 + i*k channels.
        tail: transition or head to run in the same node, so that the features stay inside it.
        recompute: "pointwise", "layer" or "block".
        channels_last: the output's memory order; None: that of the input, as in ordinary autograd.
    """
    parts: Parts = (tuple(layers), tail)
    _check(x, parts)
    dtype = convolution_dtype(x, _first_weight(parts), "dense_block")
    lasting = without_moving_buffers(parts)
    template, tensors = take_tensors(lasting)
    call = Call(
        template,
        recompute,
        dtype,
        torch.promote_types(x.dtype, dtype),
        is_channels_last(x) if channels_last is None else channels_last,
        is_channels_last(x),
    )
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in tensors)):
        return _Segment.apply(parts, call, x, *tensors)
    with torch.no_grad():
        return _forward(parts, call, x, keep=False).output


def transition(x: Tensor, parts: Transition, *, recompute: Level = "layer") -> Tensor:
    """(N, c, *S) -> (N, c_out, *(S // 2)): a block without layers. Keeps its input alone, whatever the level."""
    return dense_block(x, (), parts, recompute=recompute)


def _first_weight(parts: Parts) -> Tensor:
    layers, tail = parts
    if layers:
        return layers[0].conv1.weight
    if not isinstance(tail, Transition):
        raise ArgumentError(describe(expected="at least one layer", got="none", where="dense_block"))
    return tail.conv.weight


def convolution_dtype(x: Tensor, weight: Tensor, where: str) -> torch.dtype:
    """The dtype in which ordinary convolutions would run: autocast's, or that of map and weight."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if x.dtype != weight.dtype:
        raise ArgumentError(
            describe(expected=f"a map of the weights' dtype {weight.dtype}", got=str(x.dtype), where=where)
        )
    return weight.dtype


def _check(x: Tensor, parts: Parts) -> None:
    layers, _ = parts
    if x.dim() not in (3, 4, 5):
        raise ArgumentError(describe(expected="a map (N, C, *S)", got=str(tuple(x.shape)), where="dense_block"))
    c = _first_weight(parts).shape[1]
    if x.shape[1] != c:
        raise ArgumentError(describe(expected=f"{c} channels", got=f"a map {tuple(x.shape)}", where="dense_block"))
    for i, layer in enumerate(layers):
        if layer.conv1.weight.shape[1] != c:
            raise ArgumentError(
                describe(
                    expected=f"layer {i} to take {c} channels",
                    got=str(layer.conv1.weight.shape[1]),
                    where="dense_block",
                )
            )
        c += layer.growth
    for norm in norms_of(parts):
        check_count(norm, x)
    if len({norm.reduce for norm in norms_of(parts) if norm.uses_batch}) > 1:
        raise UnsupportedError(
            describe(
                expected="one process group for all batch norms of a block",
                got="several",
                where="dense_block",
                fix='use recompute="none"',
            )
        )


def without_moving_buffers(parts: Any) -> Any:
    """`parts` without the running statistics of norms that use the batch's: nothing in the backward reads them, and the
    next forward changes them."""
    if isinstance(parts, BatchNorm):
        frozen = not parts.uses_batch
        return replace(
            parts,
            running_mean=parts.running_mean if frozen else None,
            running_var=parts.running_var if frozen else None,
            num_batches_tracked=None,
        )
    if isinstance(parts, tuple):
        return tuple(without_moving_buffers(item) for item in parts)
    if isinstance(parts, DenseLayer | Transition | Head):
        return replace(parts, **{f.name: without_moving_buffers(getattr(parts, f.name)) for f in fields(parts)})
    return parts


@dataclass
class _Result:
    output: Tensor
    features: Tensor  # (N, C, S)
    statistics: Statistics
    random_states: dict[int, Tensor]
    kept: list[Tensor]


def _start_features(call: Call, x: Tensor, channels: int, tail: object) -> tuple[Tensor, Tensor | None]:
    """F as an (N, C, S) view that holds x, and the (N, C, *S) tensor to return where F is the output itself."""
    n, c0, *spatial = x.shape
    if channels == c0:  # no layers: nothing will be written
        return x.to(call.map_dtype).flatten(2), None
    output = None
    if tail is None:
        output = new_images(x, (n, channels, *spatial), channels_last=call.channels_last, dtype=call.map_dtype)
        features = output.flatten(2)
    else:
        rows = call.channels_last or x.device.type == "cpu"
        features = new_map(x, n, channels, torch.Size(spatial).numel(), rows=rows, dtype=call.map_dtype)
    features[:, :c0] = x.flatten(2)
    return features, output


def _forward(parts: Parts, call: Call, x: Tensor, *, keep: bool) -> _Result:
    layers, tail = parts
    with torch.autocast(x.device.type, enabled=False):
        channels = x.shape[1] + sum(layer.growth for layer in layers)
        features, output = _start_features(call, x, channels, tail)
        tools = Tools.for_map(features, x.shape[2:], call.dtype, call.channels_last)
        vector = features.new_zeros(
            channels if any(n.uses_batch for n in norms_of(parts)) else 0, dtype=accumulation_dtype(features)
        )
        statistics = Statistics(vector, vector.clone())
        random_states: dict[int, Tensor] = {}
        tail_norm = None if tail is None else tail.norm
        kept = forward_layers(
            tools, features, layers, statistics, random_states, first=True, tail_norm=tail_norm, keep=keep
        )
        if tail is not None:
            moments = statistics.features(channels)
            at = norm_affine(tail.norm, moments, features)
            update_running(tail.norm, moments)
            if isinstance(tail, Transition):
                output = transition_forward(tools, features, at, tail)
            else:
                output = head_forward(tools, features, at)
    assert output is not None
    return _Result(output, features, statistics, random_states, kept)


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, parts: Parts, call: Call, x: Tensor, *tensors: Tensor) -> Tensor:
        run = _forward(parts, call, x, keep=call.level == "pointwise")
        if call.level == "block" or not parts[0]:
            base = x
        else:
            base = run.output if parts[1] is None else run.features
        pairs = [vector for pair in run.statistics.bottleneck for vector in pair]
        ctx.save_for_backward(
            base, run.statistics.mean, run.statistics.var, *pairs, *run.random_states.values(), *run.kept, *tensors
        )
        ctx.call, ctx.count, ctx.n_kept = call, run.statistics.count, len(run.kept)  # pyright: ignore[reportAttributeAccessIssue]
        ctx.shape, ctx.x_dtype = x.shape, x.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return run.output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("a dense block")
        (grad_out,) = grad_outputs
        call: Call = ctx.call
        saved = list(ctx.saved_tensors)
        base, mean, var = saved[:3]
        layers_template, _ = call.template
        n_pairs = sum(layer.norm2 is not None for layer in layers_template)
        at = 3
        pairs, at = saved[at : at + 2 * n_pairs], at + 2 * n_pairs
        dropping = [i for i, layer in enumerate(layers_template) if layer.drop_rate > 0]
        states, at = saved[at : at + len(dropping)], at + len(dropping)
        random_states = dict(zip(dropping, states, strict=True))
        kept, at = saved[at : at + ctx.n_kept], at + ctx.n_kept
        tensors = saved[at:]
        del saved
        statistics = Statistics(mean, var, list(zip(pairs[::2], pairs[1::2], strict=True)), ctx.count)
        with torch.autocast(base.device.type, enabled=False):
            return _backward(ctx, tensors, base, statistics, random_states, kept, grad_out)


def refuse_double_backward(what: str) -> None:
    """Called first in a backward: grad mode is on there only under create_graph=True."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            describe(
                expected="a backward without create_graph",
                got="create_graph=True",
                where=f"{what} at a lean level",
                fix='double backward needs recompute="none"',
            )
        )


def _backward(
    ctx: Any,
    tensors: list[Tensor],
    base: Tensor,
    statistics: Statistics,
    random_states: dict[int, Tensor],
    kept: list[Tensor],
    grad_out: Tensor,
) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    layers, tail = fill(call.template, tensors)
    slots, tail_slot = call.template
    needs = ctx.needs_input_grad[3:]
    grads: list[Tensor | None] = [None] * len(needs)
    # before anything short-lived: gradients among scratch would keep malloc from giving its pages back
    room = [torch.empty_like(t) if need else None for t, need in zip(tensors, needs, strict=True)]

    def want(slot: object) -> bool:
        return isinstance(slot, Slot) and needs[slot.index]

    def put(slot: object, value: Tensor) -> None:
        assert isinstance(slot, Slot)
        held = room[slot.index]
        assert held is not None, "nobody asked for this gradient"
        grads[slot.index] = held.copy_(value)

    n, c0, *spatial = ctx.shape
    channels = c0 + sum(layer.growth for layer in layers)
    if call.level == "block" or not layers:
        features, _ = _start_features(call, base, channels, tail)
        tools = Tools.for_map(features, spatial, call.dtype, call.channels_last)
        forward_layers(tools, features, layers, statistics, random_states, first=False)
    else:
        features = base.flatten(2) if tail is None else base
        tools = Tools.for_map(features, spatial, call.dtype, call.channels_last)

    needs_input = ctx.needs_input_grad[2]
    needs_features = needs_input or any(_wants_any(slot, want) for slot in slots)
    corrections = Corrections.zeros(features)
    grad: Tensor | None = None
    if needs_features:
        # float32 beside half-precision features: until its mean is taken off at the end, the sum is larger than the
        # gradient, and rounding it to half precision at every layer would cost digits that plain has
        dtype = accumulation_dtype(features)
        grad = new_map(features, n, channels, features.shape[2], rows=is_rows(features), dtype=dtype)
        # our own copy: the incoming gradient may be held by somebody else
        grad = grad.zero_() if tail is not None else grad.copy_(grad_out.flatten(2))
    if tail is not None:
        at = norm_affine(tail.norm, statistics.features(channels), features)
        common = (statistics.count, corrections, want, put)
        if isinstance(tail, Transition):
            assert isinstance(tail_slot, Transition)
            transition_backward(tools, features, grad, grad_out, at, tail, tail_slot, *common)
        else:
            assert isinstance(tail_slot, Head)
            head_backward(tools, features, grad, grad_out, at, tail, tail_slot, *common)
    dx = None
    if grad is not None:
        backward_layers(
            tools,
            features,
            grad,
            layers,
            slots,
            statistics,
            random_states,
            kept,
            corrections,
            want,
            put,
            needs_input=needs_input,
        )
        if needs_input:
            corrections.settle(tools.kernels, grad, features, 0, c0)
            dx = new_images(grad, ctx.shape, channels_last=call.channels_last_input, dtype=ctx.x_dtype)
            dx.flatten(2).copy_(grad[:, :c0])
    return None, None, dx, *grads


def _wants_any(node: Any, want: Any) -> bool:
    if isinstance(node, Slot):
        return want(node)
    if isinstance(node, DenseLayer | BatchNorm | Convolution):
        return any(_wants_any(getattr(node, f.name), want) for f in fields(node))
    return False
