"""Batch statistics over several ranks: two threads stand for two ranks, each with its part of one batch."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch
from dense_runs import LEAN_LEVELS, network

from lowtide.functional import dense_block
from lowtide.parts import BatchNorm, Head, Transition

RANKS = 2


class Ranks:
    """Sums a vector over threads that call with their own; counts calls and bytes."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.lock = threading.Lock()
        self.total = None
        self.calls = []

    def reducer(self, rank):
        def reduce(vector):
            with self.lock:
                self.total = vector.clone() if self.total is None else self.total + vector
            self.barrier.wait()
            vector.copy_(self.total)
            if rank == 0:
                self.calls.append(vector.numel() * vector.element_size())
            self.barrier.wait()
            self.total = None
            self.barrier.wait()

        return reduce


def with_reduce(node, reduce):
    if isinstance(node, BatchNorm):
        return dataclasses.replace(node, reduce=reduce)
    if isinstance(node, tuple):
        return tuple(with_reduce(item, reduce) for item in node)
    if dataclasses.is_dataclass(node):
        values = {f.name: with_reduce(getattr(node, f.name), reduce) for f in dataclasses.fields(node)}
        return dataclasses.replace(node, **values)
    return node


def _tail(model, which):
    if which == "transition":
        return model.features.transition1.describe()
    norm = model.features.transition1.norm
    described = BatchNorm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return Head(described) if which == "head" else None


@pytest.mark.parametrize("split", [(3, 2), (1, 4), (0, 5)])
@pytest.mark.parametrize("tail", ["transition", "head", None])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_two_ranks_equal_one_process_on_the_joined_batch(level, tail, split):
    model = network().train()
    x = torch.randn(5, 6, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def forward(net, part, reduce, weights, level):
        block = net.features.denseblock1
        layers = with_reduce(block.describe(), reduce)
        leaf = part.clone().requires_grad_()
        y = dense_block(leaf, layers, with_reduce(_tail(net, tail), reduce), recompute=level)
        (y * weights[: len(y)]).sum().backward()
        return y.detach(), leaf.grad

    whole = copy.deepcopy(model)
    size = {"transition": (9, 4, 4), "head": (18,), None: (18, 8, 8)}[tail]
    weights = torch.randn(5, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = forward(whole, x, None, weights, "none")

    ranks = Ranks()
    nets = [copy.deepcopy(model) for _ in range(RANKS)]
    found: list = [None] * RANKS

    def work(rank):
        images = slice(0, split[0]) if rank == 0 else slice(split[0], 5)
        found[rank] = forward(nets[rank], x[images], ranks.reducer(rank), weights[images], level)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(result is not None for result in found), "a rank failed"

    for i in range(2):
        torch.testing.assert_close(torch.cat([r[i] for r in found]), expected[i], rtol=1e-9, atol=1e-9)
    for (name, p), *parts in zip(whole.named_parameters(), *(n.parameters() for n in nets), strict=True):
        if p.grad is not None:
            total = sum(q.grad for q in parts)
            torch.testing.assert_close(total, p.grad, rtol=1e-8, atol=1e-9 * max(1.0, p.grad.abs().max().item())), name
    for name, buffer in whole.named_buffers():
        for net in nets:
            torch.testing.assert_close(net.get_buffer(name), buffer, rtol=1e-10, atol=1e-10)

    # L = 3 layers, c0 = 6, k = 4, b*k = 16, 8 bytes a number. Forward: the input channels, then new channels and
    # bottleneck of each layer (the last layer's new channels if the tail needs them). Backward: bottleneck and norm1 of
    # each layer, and the tail's norm
    new = [6, 4, 4] + ([4] if tail else [])
    forward_bytes = [(2 * c + 1) * 8 for c in [*new, 16, 16, 16]]
    backward_bytes = [2 * c * 8 for c in [16, 6, 16, 10, 16, 14] + ([18] if tail else [])]
    assert sorted(ranks.calls) == sorted(forward_bytes + backward_bytes)
    assert len(ranks.calls) == 4 * 3 + (2 if tail else 0)


def test_a_wrong_count_is_seen():
    """A rank that forgets its own count gets other statistics: the comparison above can fail."""
    model = network().train()
    x = torch.randn(5, 6, 8, 8, dtype=torch.float64)

    def double_count(vector):
        vector[-1] *= 2

    layers = with_reduce(model.features.denseblock1.describe(), double_count)
    plain = dense_block(x, model.features.denseblock1.describe(), recompute="layer")
    assert (dense_block(x, layers, recompute="layer") - plain).abs().max() > 1e-3
    assert isinstance(model.features.transition1.describe(), Transition)
