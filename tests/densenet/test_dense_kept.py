"""Bytes kept for backward, whole networks, exactly: formulas written here from the shapes alone.

One channel of a map is N * S * itemsize bytes. Kept storages are counted once each; parameters and the image are not
counted, and neither is the classifier's weight.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from dense_runs import LEAN_LEVELS
from torch.autograd.graph import saved_tensors_hooks

from lowtide.models import DenseNet, densenet121
from lowtide.nn import DenseBlock, Transition

RANDOM_STATE_BYTES = 5056  # of the CPU's generator


def kept_bytes(model, x):
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    storages = {}
    held = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        held.append(tensor)  # so that no address is used twice
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert y.grad_fn is not None
    return sum(storages.values())


def blocks_of(N, size, c0, config, k, theta, dims):
    """(input channels, layers, positions) of every block."""
    found = []
    for i, L in enumerate(config):
        found.append((c0, L, N * size**dims))
        c0 = int((c0 + L * k) * theta) if i < len(config) - 1 else c0 + L * k
        size //= 2
    return found, c0


def expected(level, N, size, c0, config, k, b, *, theta=0.5, item=8, dims=2, vector=None, drop=False, first_kept=True):
    """Kept by the blocks with their transitions and head, and by the classifier."""
    vector = item if vector is None else vector
    total = 0
    blocks, last = blocks_of(N, size, c0, config, k, theta, dims)
    for i, (c, L, NS) in enumerate(blocks):
        features = c + L * k
        bottlenecks = L * b * k if b else 0
        if level == "block":
            channels = c if i or first_kept else 0
        else:
            channels = features + (bottlenecks if level == "pointwise" else 0)
        total += channels * NS * item
        total += (2 * features + 2 * bottlenecks) * vector  # means and variances
        total += L * RANDOM_STATE_BYTES if drop else 0
    return total + N * last * item  # the classifier's input


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("bn_size", [4, 2, None])
@pytest.mark.parametrize("config", [(3,), (2, 3), (4, 2, 3)])
def test_network_for_small_images(level, bn_size, config):
    k, c0, N, size = 5, 7, 3, 12
    model = DenseNet(k, config, 0.5, c0, bn_size, recompute=level).double()
    x = torch.randn(N, 3, size, size, dtype=torch.float64)
    assert kept_bytes(model, x) == expected(level, N, size, c0, config, k, bn_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_dtypes(level, dtype):
    model = DenseNet(4, (2, 3), 0.5, 6, 4, recompute=level).to(dtype)
    x = torch.randn(3, 3, 8, 8, dtype=dtype)
    item = {torch.float32: 4, torch.bfloat16: 2}[dtype]
    assert kept_bytes(model, x) == expected(level, 3, 8, 6, (2, 3), 4, 4, item=item, vector=4)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_axes_dropout_and_compression(level, dims):
    model = DenseNet(4, (2, 1, 1), 0.7, 6, 4, 0.2, spatial_dims=dims, recompute=level).double()
    x = torch.randn(2, 3, *[9] * dims, dtype=torch.float64)
    assert kept_bytes(model, x) == expected(level, 2, 9, 6, (2, 1, 1), 4, 4, theta=0.7, dims=dims, drop=True)


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_densenet121(level):
    """The stem for large images keeps its convolution's output at "pointwise" alone, else nothing but the image."""
    N, c0 = 2, 64
    model = densenet121(num_classes=5, recompute=level)
    x = torch.randn(N, 3, 64, 64)
    stem = 2 * c0 * 4 + (N * c0 * 32 * 32 * 4 if level == "pointwise" else 0)
    blocks = expected(level, N, 16, c0, (6, 12, 24, 16), 32, 4, item=4)
    assert kept_bytes(model, x) == stem + blocks


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_frozen_statistics_keep_no_vectors(level):
    model = DenseNet(4, (2, 3), 0.5, 6, None, recompute=level).double().eval()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    blocks, last = blocks_of(3, 8, 6, (2, 3), 4, 0.5, 2)
    channels = [(c if level == "block" else c + L * 4) * NS for c, L, NS in blocks]
    assert kept_bytes(model, x) == sum(channels) * 8 + 3 * last * 8


def _block_bytes(L, level, c0=6, k=4, b=4):
    block = DenseBlock(L, c0, b, k, recompute=level).double()
    x = torch.randn(2, c0, 6, 6, dtype=torch.float64, requires_grad=True)
    return kept_bytes(block, x)


@pytest.mark.parametrize("level", ["pointwise", "layer"])
def test_a_block_alone_is_linear_in_its_depth_and_plain_is_quadratic(level):
    c0, k, b, NS = 6, 4, 4, 2 * 36
    for L in (4, 8, 16, 32):
        maps = (c0 + L * k + (L * b * k if level == "pointwise" else 0)) * NS * 8
        assert _block_bytes(L, level) == maps + (2 * (c0 + L * k) + 2 * L * b * k) * 8
    per_layer = {_block_bytes(L + 1, level) - _block_bytes(L, level) for L in (4, 8, 16, 31)}
    assert len(per_layer) == 1
    plain = [_block_bytes(L + 1, "none") - _block_bytes(L, "none") for L in (4, 8, 16, 31)]
    # each further layer keeps its own concatenation and its relu's output, both as wide as all layers before it
    slopes = [(later - earlier) / n for earlier, later, n in zip(plain, plain[1:], (4, 8, 15), strict=False)]
    assert slopes == pytest.approx([2 * k * NS * 8] * 3, rel=0.02)


def test_a_block_alone_at_block_keeps_its_input_only():
    for L in (4, 8, 16, 32):
        vectors = (2 * (6 + L * 4) + 2 * L * 16) * 8
        assert _block_bytes(L, "block") == vectors  # the input is the caller's


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_a_transition_alone_keeps_its_input_only(level):
    part = Transition(10, 5, recompute=level).double()
    x = torch.randn(2, 10, 6, 6, dtype=torch.float64, requires_grad=True)
    assert kept_bytes(part, x) == 2 * 10 * 8


def test_the_count_sees_what_plain_keeps():
    """The counter itself: relu keeps its output, a product both factors."""
    x = torch.randn(10, requires_grad=True)

    class Chain(torch.nn.Module):
        def forward(self, x):
            return (torch.relu(x) * torch.exp(x)).sum()

    assert kept_bytes(Chain(), x) == 2 * prod(x.shape) * 4


def test_no_tensor_hides_on_a_node():
    """Everything kept goes through save_for_backward, where hooks and meters see it."""
    model = DenseNet(4, (2, 1), 0.5, 6, 4, 0.1, small_inputs=False, recompute="pointwise")
    y = model(torch.randn(2, 3, 32, 32))
    nodes, seen = [y.grad_fn], set()
    ours = 0
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        if type(node).__name__ in ("_SegmentBackward", "_StemBackward"):
            ours += 1
            assert not _tensors_in(vars(node) if hasattr(node, "__dict__") else {})
    assert ours == 3


def _tensors_in(value, depth=0):
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 8:
        return []
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors_in(v, depth + 1)]
    if isinstance(value, list | tuple | set):
        return [t for v in value for t in _tensors_in(v, depth + 1)]
    return [t for v in getattr(value, "__dict__", {}).values() for t in _tensors_in(v, depth + 1)]
