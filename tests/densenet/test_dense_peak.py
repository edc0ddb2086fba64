"""Allocation peak of a training step, bounded by the maps that must exist: derived from shapes, never recorded."""

from __future__ import annotations

import pytest
import torch
from dense_runs import LEAN_LEVELS
from torch.autograd.profiler import record_function

import lowtide
from lowtide.lean.maps import tile_bytes
from lowtide.measure.allocations import FORWARD, record
from lowtide.models import DenseNet
from lowtide.nn import DenseBlock

N, SIZE, K, B, C0 = 16, 32, 12, 4, 24
CONFIG = (8, 8)


@pytest.fixture(scope="module")
def measured():
    found = {}
    for level in ("none", *LEAN_LEVELS):
        torch.manual_seed(0)
        model = DenseNet(K, CONFIG, 0.5, C0, B, recompute=level)
        x = torch.randn(N, 3, SIZE, SIZE)
        model(x).sum().backward()  # libraries' own buffers, and the gradients
        found[level] = lowtide.measure(lambda: model(x), repeats=1)  # noqa: B023
    return found


def _channel(size):
    return N * size * size * 4


def test_peaks_fall_and_kept_bytes_fall_further(measured):
    peaks = {level: m.peak_bytes for level, m in measured.items()}
    kept = {level: m.saved_bytes for level, m in measured.items()}
    assert peaks["none"] > peaks["pointwise"] > peaks["layer"]
    assert peaks["block"] <= 1.1 * peaks["layer"]
    assert kept["none"] > kept["pointwise"] > kept["layer"] > kept["block"] > 0


def test_peak_is_features_gradient_and_two_bottleneck_maps(measured):
    """F, dF, h and da of the first block; the second block's features are still there when its backward starts."""
    features1, features2 = C0 + 8 * K, (C0 + 8 * K) // 2 + 8 * K
    first = (2 * features1 + 2 * B * K) * _channel(SIZE)
    both = features1 * _channel(SIZE) + (2 * features2 + 2 * B * K) * _channel(SIZE // 2)
    # tiles: z, dz and a convolution's own copies; the block's input and its gradient; vectors and weight gradients
    tiles = 8 * tile_bytes(torch.device("cpu")) + 2 * C0 * _channel(SIZE)
    parameters = 4 * sum(p.numel() for p in DenseNet(K, CONFIG, 0.5, C0, B).parameters())
    bound = max(first, both) + tiles + 2 * parameters
    assert measured["layer"].peak_bytes <= bound
    assert measured["block"].peak_bytes <= bound
    bottlenecks = sum(8 * B * K * _channel(SIZE // 2**i) for i in range(2))
    assert measured["pointwise"].peak_bytes <= bound + bottlenecks
    assert measured["none"].peak_bytes > 2 * bound, "the bound would not tell plain from lean"


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_gradients_have_their_memory_before_any_scratch(level):
    """A gradient between scratch of the same backward would keep malloc from giving the pages around it back."""
    torch.manual_seed(0)
    block = DenseBlock(8, C0, B, K, recompute=level)
    x = torch.randn(N, C0, SIZE, SIZE)
    with record(torch.device("cpu")) as recorder:
        with record_function(FORWARD):
            y = block(x)
        y.sum().backward()
    trace = recorder.trace
    weights = sorted((p.numel() * 4 for p in block.parameters()), reverse=True)
    outliving = [a.index for a in trace.alive_after(len(trace.live_bytes) - 1) if "SegmentBackward" in a.operator]
    passing = [a for a in trace.allocations if "SegmentBackward" in a.operator and a.freed is not None]
    scratch = [a.index for a in passing if a.nbytes > weights[0]]
    assert len(outliving) == len(weights)
    assert max(outliving) < min(scratch)


def test_kept_bottleneck_maps_are_one_piece():
    """One by one they would lie between what lives longer, and leave holes."""
    torch.manual_seed(0)
    block = DenseBlock(8, C0, B, K, recompute="pointwise")
    with record(torch.device("cpu")) as recorder:
        with record_function(FORWARD):
            y = block(torch.randn(N, C0, SIZE, SIZE))
        y.sum().backward()
    kept = sorted(a.nbytes for a in recorder.trace.alive_after_forward())
    assert 8 * B * K * _channel(SIZE) in kept
    assert B * K * _channel(SIZE) not in kept
