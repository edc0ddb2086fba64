"""Kept bytes of small functions against figures worked out by hand; nothing is recorded from a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.measure import measure

N = 1000
BYTES = 4 * N  # of one float32 tensor of N numbers


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or (N,), dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


class HiddenOnCtx(torch.autograd.Function):
    """y = x^2 that keeps 2x as an attribute: no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 2 * x
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.slope


def view_of_a_saved_storage(x: Tensor) -> Tensor:
    y = x.exp()  # keeps its result, N numbers
    return y[: N // 10].sin() + y[N // 2 : N // 2 + N // 10].cos()  # each keeps a view into the same storage


def small_view_keeps_the_whole(x: Tensor) -> Tensor:
    return (x + 1)[:3].sin()  # three numbers are saved, their storage has N


def in_place(x: Tensor) -> Tensor:
    y = x * 2  # keeps nothing: the factor is a number
    return y.relu_()  # keeps its result, which is y's own storage


def two_nodes_one_storage(x: Tensor) -> Tensor:
    y = x + 1
    return y.sin() + y.cos()  # both keep y


def saved_output(x: Tensor) -> Tensor:
    return (x + 1).sigmoid()  # keeps its result, not its input


def expanded(x: Tensor) -> Tensor:
    return (x[:1] + 1).expand(N).sin()  # a view of N numbers on a storage of one


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x + 1, 0.5, training=True)  # keeps the mask, scaled, in the input's dtype; not the input


def two_forwards_then_backward(x: Tensor) -> list[Tensor]:
    return [(x + 1).exp(), (x + 2).exp()]  # both results wait for the backward


def two_steps_in_turn(x: Tensor) -> None:
    for shift in (1, 2):
        (x + shift).exp().backward(torch.ones(N))  # the first is free before the second begins


def checkpointed(x: Tensor, reentrant: bool) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return y.exp().sin().exp()  # in ordinary autograd: two results of exp, the first also the input of sin

    return checkpoint(inner, x + 1, use_reentrant=reentrant)


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.exp().sin()


def hidden(x: Tensor) -> Tensor:
    return HiddenOnCtx.apply(x + 1)  # type: ignore[return-value]


BY_HAND: list[tuple[Callable[..., Any], int]] = [
    (view_of_a_saved_storage, BYTES),
    (small_view_keeps_the_whole, BYTES),
    (in_place, BYTES),
    (two_nodes_one_storage, BYTES),
    (saved_output, BYTES),
    (expanded, 4),
    (dropout, BYTES),
    (two_forwards_then_backward, 2 * BYTES),
    (two_steps_in_turn, BYTES),
    (without_grad, 0),
    (hidden, 0),
]


@pytest.mark.parametrize(("fn", "expected"), BY_HAND, ids=lambda value: getattr(value, "__name__", str(value)))
def test_saved_bytes_by_hand(fn: Callable[..., Any], expected: int) -> None:
    m = measure(fn, leaf(), repeats=1)
    assert m.saved_bytes == expected
    assert m.saved_input_bytes == 0
    assert sum(h.nbytes for h in m.holders) == expected
    assert m.timeline.kept_bytes[-1:] in ((), (0,)), "everything kept is released by the end"


def test_a_tensor_on_ctx_is_reported_not_missed() -> None:
    m = measure(hidden, leaf(), repeats=1)
    assert m.saved_bytes == 0
    assert m.after_forward_bytes == 2 * BYTES  # the hidden slope and the result; x + 1 is free
    assert m.outside_autograd_bytes == BYTES
    assert [(h.nbytes, h.operator) for h in m.outside_autograd] == [(BYTES, "HiddenOnCtx > aten::mul")]
    honest = measure(lambda x: (x + 1) * (x + 1), leaf(), repeats=1)
    assert honest.outside_autograd_bytes == 0
    assert honest.outside_autograd == ()


def test_checkpoint_keeps_its_input_and_the_random_state() -> None:
    m = measure(checkpointed, leaf(), False, repeats=1)
    assert m.saved_bytes == BYTES  # what the recompute keeps, torch's own inner hooks hide: the peak shows it
    assert m.outside_autograd_bytes == torch.get_rng_state().nbytes
    # reentrant: the input, and during the recompute both results of exp as well
    assert measure(checkpointed, leaf(), True, repeats=1).saved_bytes == 3 * BYTES


def test_inputs_and_parameters_are_apart() -> None:
    x = leaf(8, 5)
    m = measure(nn.Linear(5, 7), x, repeats=1)
    assert (m.saved_bytes, m.saved_input_bytes) == (8 * 5 * 4, 8 * 5 * 4)  # the input, for the weight's gradient
    assert m.saved_parameter_bytes == 5 * 7 * 4  # the weight (its transpose, a view), for the input's gradient
    assert [h.kind for h in m.holders] == ["input"]

    weight = nn.Parameter(torch.randn(7, 5))
    m = measure(lambda t: t @ weight.T, x, repeats=1)  # no module anywhere
    assert (m.saved_bytes, m.saved_parameter_bytes) == (8 * 5 * 4, 5 * 7 * 4)

    m = measure(lambda: x.sin(), repeats=1)  # no argument, and there before the call
    assert (m.saved_bytes, m.saved_input_bytes) == (8 * 5 * 4, 0)
    assert [h.kind for h in m.holders] == ["outside"]


def test_batch_norm_keeps_its_input_and_two_vectors() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6))
    m = measure(net, torch.randn(2, 3, 4, 5), repeats=1)
    image, maps, vectors = 2 * 3 * 4 * 5 * 4, 2 * 6 * 4 * 5 * 4, 2 * 6 * 4
    assert (
        m.saved_bytes == image + maps + vectors
    )  # the convolution keeps the image, the norm its input, mean and 1/std
    assert m.by_module() == {"1": maps + vectors, "0": image}
    weights, running = (6 * 3 + 6) * 4, 2 * 6 * 4
    assert m.saved_parameter_bytes == weights + running


def test_holders_are_named_and_sorted() -> None:
    net = nn.Sequential()
    net.add_module("wide", nn.Sequential(nn.Linear(4, 64), nn.Tanh()))
    net.add_module("narrow", nn.Sequential(nn.Linear(64, 2), nn.Sigmoid()))
    m = measure(net, torch.randn(8, 4), repeats=1)
    assert [(h.nbytes, h.module, h.operator) for h in m.holders] == [
        (8 * 64 * 4, "wide.1", "aten::tanh"),
        (8 * 4 * 4, "wide.0", ""),  # the input
        (8 * 2 * 4, "narrow.1", "aten::sigmoid"),
    ]
    assert m.holders[0].shape == (8, 64)
    assert m.holders[0].dtype == "torch.float32"


def test_half_precision_counts_two_bytes() -> None:
    assert measure(saved_output, leaf(dtype=torch.bfloat16), repeats=1).saved_bytes == 2 * N


def test_sparse_parts_are_counted() -> None:
    indices, values = torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.randn(3)
    sparse = torch.sparse_coo_tensor(indices, values, (3, 3), is_coalesced=True, check_invariants=True)
    m = measure(lambda dense: torch.sparse.mm(sparse, dense), leaf(3, 4), repeats=1)
    assert m.saved_bytes == indices.nbytes + values.nbytes  # the constant matrix, for the gradient of the dense one
