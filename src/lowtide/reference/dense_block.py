"""The dense block in ordinary autograd: what the answer is. Memory grows with the square of the depth.

Shapes: N images, S positions (any number of axes), c0 input channels, L layers, k growth, b*k bottleneck channels.
Source: Huang et al. 2017, arXiv 1608.06993, section 3 ("composite function", "bottleneck layers").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import DenseLayer, Head, Transition
from lowtide.reference.layers import batch_norm, convolve
from lowtide.reference.transition import head, transition


def dense_block(x: Tensor, layers: Sequence[DenseLayer], tail: Transition | Head | None = None) -> Tensor:
    """x (N, c0, *S) -> concat of x and every layer's output, (N, c0 + L*k, *S); then the tail, if there is one."""
    features = x
    for layer in layers:
        features = torch.cat([features, dense_layer(features, layer)], 1)
    if isinstance(tail, Transition):
        return transition(features, tail)
    return features if tail is None else head(features, tail)


def dense_layer(x: Tensor, layer: DenseLayer) -> Tensor:
    """The k new channels, (N, c, *S) -> (N, k, *S)."""
    new = convolve(F.relu(batch_norm(x, layer.norm1)), layer.conv1)
    if layer.norm2 is not None and layer.conv2 is not None:
        new = convolve(F.relu(batch_norm(new, layer.norm2)), layer.conv2)
    drop = torch.feature_dropout if layer.drop_channels else torch.dropout
    return drop(new, layer.drop_rate, layer.drop_rate > 0)
