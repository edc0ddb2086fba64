"""Any tree of inputs and outputs, integer tokens, complex numbers, functions, bound methods."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError

Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Result:
    logits: Tensor
    parts: list[Tensor]
    n: int


class Tokens(nn.Module):
    """Integer tokens and an optional mask in, a chosen tree out."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> object:
        hidden = self.embedding(tokens)
        if mask is not None:
            hidden = hidden * mask[..., None]
        logits = self.head(hidden)
        return {
            "tensor": logits,
            "dict": {"logits": logits, "aux": {"hidden": hidden, "best": logits.argmax(-1), "none": None, "n": 3}},
            "pair": Pair(logits, hidden),
            "dataclass": Result(logits, [hidden, hidden * 2], 3),
        }[self.form]


class Scaled(Tokens):
    """One output of the tree is off by 1 %."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> object:
        out = super().forward(tokens, mask)
        if isinstance(out, dict):
            out["aux"]["hidden"] = out["aux"]["hidden"] * 1.01
        elif isinstance(out, Pair):
            out = out._replace(hidden=out.hidden * 1.01)
        elif isinstance(out, Result):
            out.parts[1] = out.parts[1] * 1.01
        else:
            out = out * 1.01
        return out


TOKENS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("tensor", "output"),
        ("dict", "output['aux']['hidden']"),
        ("pair", "output.hidden"),
        ("dataclass", "output.parts[1]"),
    ],
)
def test_trees_of_outputs_are_compared_leaf_by_leaf(form: str, name: str) -> None:
    assert lowtide.verify(Tokens(form), Tokens(form), TOKENS).ok
    report = lowtide.verify(Tokens(form), Scaled(form), TOKENS)
    assert [(f.kind, f.name) for f in report.failures] == [("output", name)]
    assert report.first_module == ""


def test_inputs_may_be_positional_or_by_keyword() -> None:
    mask = torch.rand(3, 5)
    positional = lowtide.verify(Tokens(), Tokens(), (TOKENS, mask))
    keyword = lowtide.verify(Tokens(), Tokens(), {"tokens": TOKENS, "mask": mask})
    assert positional.ok
    assert keyword.ok
    assert {r.name for r in positional.rows if r.kind == "input_grad"} == {"input[1]"}
    assert {r.name for r in keyword.rows if r.kind == "input_grad"} == {"input['mask']"}


def test_a_list_as_one_argument() -> None:
    class Concat(nn.Module):
        def forward(self, parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, 1).square()

    parts = [torch.randn(2, 3), torch.randn(2, 1)]
    report = lowtide.verify(Concat(), Concat(), (parts,))
    assert report.ok
    assert {r.name for r in report.rows if r.kind == "input_grad"} == {"input[0]", "input[1]"}
    with pytest.raises(ArgumentError, match=r"wrap a single list argument as \(the_list,\)"):
        lowtide.verify(Concat(), Concat(), parts)


@pytest.mark.parametrize("other", ["dict", "pair"])
def test_another_structure_or_shape_or_dtype_is_an_output_failure(other: str) -> None:
    report = lowtide.verify(Tokens(), Tokens(other), TOKENS)
    assert [f.kind for f in report.failures] == ["output"]
    assert "structure" in report.failures[0].message


def test_shape_and_dtype_of_an_output_count() -> None:
    x = torch.randn(3, 4)
    wrong_shape = lowtide.verify(torch.sin, lambda x: torch.sin(x)[:, :1], x)
    wrong_dtype = lowtide.verify(torch.sin, lambda x: torch.sin(x).float(), x)
    assert "expected shape (3, 4), got (3, 1)" in wrong_shape.failures[0].message
    assert "expected dtype float64, got float32" in wrong_dtype.failures[0].message


def test_functions_and_complex_numbers() -> None:
    z = torch.randn(4, 8, dtype=torch.complex64)
    assert lowtide.verify(torch.fft.fft, lambda z: torch.fft.ifft(z.conj()).conj() * 8, z).ok
    report = lowtide.verify(torch.fft.fft, lambda z: torch.fft.fft(z).conj(), z)
    assert [f.kind for f in report.failures] == ["output"]


def test_complex_parameters_stay_complex() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, 8)

    report = lowtide.verify(Spectral(), Spectral(), torch.randn(3, 8))
    assert report.ok
    assert {r.name for r in report.rows if r.kind == "param_grad"} == {"filter"}


def test_bound_methods_have_the_weights_of_their_module() -> None:
    class Net(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(4, 2), factor

        def features(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.factor

    x = torch.randn(3, 4)
    report = lowtide.verify(Net(1.0).features, Net(1.0).features, x)
    assert report.ok
    assert {r.name for r in report.rows if r.kind == "param_grad"} == {"linear.weight", "linear.bias"}
    assert lowtide.verify(Net(1.0).features, Net(1.01).features, x).failures[0].kind == "output"


def test_half_precision_modules_are_verified_in_their_own_dtype() -> None:
    net = nn.Linear(4, 2).to(torch.bfloat16)
    report = lowtide.verify(net, net, torch.randn(3, 4))
    assert report.ok
    assert {r.dtype for r in report.rows} == {"float64", "bfloat16"}


@pytest.mark.parametrize("inputs", [3.0, None, "x", {1: torch.ones(1)}])
def test_other_inputs_are_refused(inputs: object) -> None:
    with pytest.raises(ArgumentError, match="a tensor, a tuple of positional arguments or a dict"):
        lowtide.verify(torch.sin, torch.sin, inputs)
