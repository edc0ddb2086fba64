"""One SGConv layer on sequences on the disk: the convolution of a few channels, and what follows it at a few positions.

The convolution streams: nothing but the state of a stream stays in memory, and a two-sided layer's reverse kernels
stream from the end to the beginning. Neither reads what it writes but the convolution's own sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lowtide.functional import StreamFilter, sgconv_map, stream_block_rows, stream_filter, stream_state
from lowtide.nn import SGConv
from lowtide.stream.arrays import Sequence

DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def convolve(layer: SGConv, u: Sequence, p: Sequence, L: int, features: slice, block: int) -> None:
    """Convolution and skip of some features of u (H, L), whatever p (channels * H, L) holds there before."""
    _convolve_forward(layer, u, p, L, features, block)
    if layer.form.bidirectional:
        _convolve_reverse(layer, u, p, L, features, block)


# one after the other, so that never two states, each as long as the kernel, are in memory
def _convolve_forward(layer: SGConv, u: Sequence, p: Sequence, L: int, features: slice, block: int) -> None:
    filter = _filter(layer, features, reverse=False)
    state = stream_state(filter, 1)
    for start in range(0, L, block):
        times = slice(start, min(start + block, L))
        _write(layer, p, stream_block_rows(_read(layer, u, features, times), state, filter), features, times)


def _convolve_reverse(layer: SGConv, u: Sequence, p: Sequence, L: int, features: slice, block: int) -> None:
    filter = _filter(layer, features, reverse=True)
    state = stream_state(filter, 1)
    last = torch.zeros(1, 1, layer.form.channels, features.stop - features.start, dtype=layer.D.dtype)
    for stop in range(L, 0, -block):
        times = slice(max(0, stop - block), stop)
        ahead = stream_block_rows(_read(layer, u, features, times).flip(0), state, filter)
        # reverse tap j has lag -(j+1): an output takes what streamed up to the sample behind it
        _write(layer, p, torch.cat([last, ahead[:-1]]).flip(0), features, times, add=True)
        last = ahead[-1:].clone()


@torch.no_grad()
def map_outputs(layer: SGConv, p: Sequence, times: slice) -> Tensor:
    """Activation, norm and output map at some positions of p (channels * H, L): (T, O)."""
    assert layer.output_linear is not None
    D = layer.form.channels * layer.D.shape[1]
    rows = torch.from_numpy(p.read(slice(0, D), times)).T.unsqueeze(1)
    norm, output = layer.norm, layer.output_linear
    norm_weight, norm_bias = (None, None) if norm is None else (norm.weight, norm.bias)
    form = replace(layer.form, transposed=False)
    return sgconv_map(rows, output.weight, output.bias, norm_weight, norm_bias, form=form).squeeze(1)


def _filter(layer: SGConv, features: slice, *, reverse: bool) -> StreamFilter:
    C = layer.form.channels
    rows = slice(C, 2 * C) if reverse else slice(0, C)
    return stream_filter(
        [piece.detach()[rows, features] for piece in layer.kernel_list],
        layer.multiplier if layer.multiplier.dim() == 0 else layer.multiplier[:, features],
        None if layer.decay is None else layer.decay.detach()[features],
        layer.kernel_norm[rows, features],
        None if reverse else layer.D.detach()[:, features],
        form=layer.form.kernel,
    )


def _read(layer: SGConv, u: Sequence, features: slice, times: slice) -> Tensor:
    """(T, 1, features), in the layer's dtype."""
    return torch.from_numpy(u.read(features, times).T.astype(DTYPES[layer.D.dtype], order="C")).unsqueeze(1)


def _write(layer: SGConv, p: Sequence, y: Tensor, features: slice, times: slice, *, add: bool = False) -> None:
    """y (T, 1, C, features) to the rows c * H + features of p."""
    for c, values in enumerate(y.squeeze(1).unbind(1)):
        first = c * layer.D.shape[1]
        rows = slice(first + features.start, first + features.stop)
        part = values.T.numpy()
        p.write(part + p.read(rows, times) if add else part, rows, times)
