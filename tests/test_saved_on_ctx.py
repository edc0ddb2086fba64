"""The contexts of real graphs hold no tensor but those of save_for_backward, which hooks and the meter see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.functional import long_conv
from lowtide.levels import LEVELS
from lowtide.models import DenseNet, densenet121, densenet_bc
from lowtide.nn import SGConv


def nodes(output: Tensor) -> list[Any]:
    """Every autograd node below `output`."""
    seen: dict[int, Any] = {}
    left = [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node
            left += [below for below, _ in node.next_functions]
    return list(seen.values())


def tensors_in(value: Any, where: str, seen: set[int]) -> Iterator[str]:
    """Where tensors hide: in containers, objects, closures. A module's own parameters and buffers are the model's."""
    if id(value) in seen or isinstance(value, nn.Module | torch.dtype | torch.device | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield f"{where}: {tuple(value.shape)} {value.dtype}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]", seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]", seen)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{where}.{field.name}", seen)
    elif callable(value) and getattr(value, "__closure__", None):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            yield from tensors_in(cell.cell_contents, f"{where} closure {name}", seen)
    elif hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield from tensors_in(item, f"{where}.{name}", seen)


def hidden(output: Tensor) -> tuple[int, list[str]]:
    """Number of our own nodes (autograd functions written in Python), and the tensors on their contexts.

    A recorded state of the random generator may be there: it is what makes dropout masks again, and a few KiB at most.
    """
    own = [node for node in nodes(output) if isinstance(node, torch.autograd.function.BackwardCFunction)]
    found = [text for node in own for text in tensors_in(vars(node), type(node).__name__, set())]
    generator = f"({torch.get_rng_state().numel()},) torch.uint8"
    return len(own), [text for text in found if not text.endswith(generator)]


def dense(level: str) -> Tensor:
    return densenet_bc(16, 4, recompute=level)(torch.randn(2, 3, 16, 16))


def dense_with_dropout(level: str) -> Tensor:
    return DenseNet(4, (2, 2), drop_rate=0.3, recompute=level)(torch.randn(2, 3, 16, 16))


def dense_without_bottleneck(level: str) -> Tensor:
    return DenseNet(4, (2, 2), bn_size=None, recompute=level)(torch.randn(2, 3, 16, 16))


def dense_with_pooling_stem(level: str) -> Tensor:
    return densenet121(10, recompute=level)(torch.randn(2, 3, 33, 33))


def frozen(level: str) -> Tensor:
    return densenet_bc(16, 4, recompute=level).eval()(torch.randn(2, 3, 16, 16, requires_grad=True))


def sgconv(level: str) -> Tensor:
    layer = SGConv(4, 64, kernel_dim=8, bidirectional=True, postact="glu", dropout=0.2, recompute=level)
    return layer(torch.randn(2, 4, 50))


def convolution(level: str) -> Tensor:
    u, k = torch.randn(2, 4, 50, requires_grad=True), torch.randn(4, 50, requires_grad=True)
    return long_conv(u, k, torch.randn(4, requires_grad=True), recompute=level)


CASES: list[Callable[[str], Tensor]] = [
    dense, dense_with_dropout, dense_without_bottleneck, dense_with_pooling_stem, frozen, sgconv, convolution
]  # fmt: skip


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_tensor_is_hidden_on_a_context(case: Callable[[str], Tensor], level: str) -> None:
    n_own, found = hidden(case(level))
    assert n_own > 0, "no lean node ran"
    assert found == []


def test_the_search_finds_hidden_tensors() -> None:
    @dataclasses.dataclass
    class Call:
        inner: Any

    class Hiding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.plain = {"a": [x.detach() + 1]}
            ctx.call = Call((lambda y: lambda: y)(x.detach() + 2))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    n_own, found = hidden(Hiding.apply(torch.ones(3, requires_grad=True)) + 1)
    assert n_own == 1
    assert len(found) == 2
