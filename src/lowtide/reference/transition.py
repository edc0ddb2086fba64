"""What stands around the dense blocks, in ordinary autograd: stem, transition and head.

Source: Huang et al. 2017, arXiv 1608.06993, section 3 ("pooling layers") and table 1.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lowtide.parts import Head, Stem, Transition
from lowtide.reference.layers import batch_norm, convolve


def transition(x: Tensor, parts: Transition) -> Tensor:
    """(N, c, *S) -> (N, c_out, *(S // 2)): norm, relu, 1x1 convolution, average pool."""
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[x.dim() - 2]
    return pool(convolve(F.relu(batch_norm(x, parts.norm)), parts.conv), 2, 2)


def head(x: Tensor, parts: Head) -> Tensor:
    """(N, c, *S) -> (N, c): norm, relu, mean over all positions."""
    return F.relu(batch_norm(x, parts.norm)).flatten(2).mean(2)


def stem(x: Tensor, parts: Stem) -> Tensor:
    """(N, c_in, *S) -> (N, c0, *S/4): convolution, norm, relu, max pool."""
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[x.dim() - 2]
    y = function(x, parts.conv.weight, parts.conv.bias, parts.stride, parts.padding)
    return pool(F.relu(batch_norm(y, parts.norm)), 3, 2, 1)
