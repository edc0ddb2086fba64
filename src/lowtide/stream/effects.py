"""What a live pipe can do to its frames: a layer, or the taps of an impulse response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.functional import StreamFilter, stream_block_rows, stream_filter_of_taps, stream_state
from lowtide.nn import SGConv


@dataclass(frozen=True)
class Effect:
    """Turns float32 frames (T, channels_in) into frames (T', channels_out), and goes on where it stopped.

    Output t belongs to input t - lookahead; the first calls return fewer frames by as many, `finish` returns the rest.
    """

    channels_in: int
    channels_out: int
    process: Callable[[Tensor], Tensor]
    finish: Callable[[], Tensor]
    lookahead: int = 0


def layer_effect(layer: SGConv) -> Effect:
    """An SGConv layer in eval mode; frames are its features."""
    state = layer.eval().initial_state(1)
    H, dtype = layer.D.shape[1], layer.D.dtype
    time_last = layer.form.transposed

    def frames(y: Tensor) -> Tensor:
        return (y[0].T if time_last else y[0]).float()

    def process(x: Tensor) -> Tensor:
        rows = x.to(dtype)
        return frames(layer.chunk((rows.T if time_last else rows).unsqueeze(0), state)[0])

    channels_out = H if layer.output_linear is not None else layer.form.channels * H
    return Effect(H, channels_out, process, lambda: frames(layer.finish(state)[0]), layer.lookahead)


def response_effect(response: Tensor, channels: int, gain: float = 1.0, tail: bool = False) -> Effect:
    """Convolution with an impulse response (R, K), R = 1 for all channels alike, or R = channels.

    tail: `finish` lets the response die away, K - 1 frames more.
    """
    R, K = response.shape
    if R not in (1, channels):
        expected, got = f"a response of 1 or {channels} channels", str(R)
        raise ArgumentError(describe(expected=expected, got=got, where="response", fix=f"choose --channels {R}"))
    filter: StreamFilter = stream_filter_of_taps((gain * response).expand(channels, K).float().unsqueeze(0))
    state = stream_state(filter, 1)

    def process(x: Tensor) -> Tensor:
        return stream_block_rows(x.unsqueeze(1), state, filter).flatten(1)

    return Effect(channels, channels, process, lambda: process(torch.zeros(K - 1 if tail else 0, channels)))
