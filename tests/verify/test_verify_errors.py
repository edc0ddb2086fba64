"""What the candidate raises is the candidate's failure; what the reference or the caller does is an ArgumentError."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError, UnsupportedError


class Block(nn.Module):
    def __init__(self, raises: str = "") -> None:
        super().__init__()
        self.linear, self.raises = nn.Linear(4, 4), raises

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.raises == "forward" or (self.raises == "float32" and x.dtype == torch.float32):
            raise ValueError("no kernel for this shape")
        if self.raises == "eval" and not self.training:
            raise UnsupportedError("eval mode is not offered")
        if self.raises == "backward":
            y = _RaisesInBackward.apply(y)
        return y


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("workspace was freed")


def net(raises: str = "") -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(Block(raises), nn.Tanh()))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("raises", "dtype", "phase", "module", "text"),
    [
        ("forward", "float64", "step 1", "2.0", "no kernel for this shape"),
        ("float32", "float32", "step 1", "2.0", "no kernel for this shape"),
        ("eval", "float64", "eval with gradients", "2.0", "eval mode is not offered"),
        ("backward", "float64", "step 1", None, "workspace was freed"),
    ],
)
def test_a_crash_of_the_candidate_is_its_failure_with_its_traceback(raises, dtype, phase, module, text) -> None:
    report = lowtide.verify(net(), net(raises), X)
    (failure,) = report.failures
    assert (failure.kind, failure.dtype, failure.phase) == ("error", dtype, phase)
    assert failure.name == (module or phase)
    assert report.first_module == module
    assert text in failure.message
    assert text in failure.traceback
    assert __file__ in failure.traceback
    assert "lowtide/verify" not in failure.traceback
    assert "the candidate's traceback" in str(report)


def test_a_crash_of_the_reference_is_the_callers_error() -> None:
    with pytest.raises(ArgumentError, match=r"the reference in step 1 \(float64\): .*ValueError: no kernel") as raised:
        lowtide.verify(net("forward"), net(), X)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_reference_that_has_no_float32_is_noted_or_refused_when_asked_for() -> None:
    report = lowtide.verify(net("float32"), net(), X)
    assert report.ok
    assert any("float32 not run" in note for note in report.notes)
    with pytest.raises(ArgumentError, match=r"step 1 \(float32\)|float32\): expected a reference that runs"):
        lowtide.verify(net("float32"), net(), X, dtype=torch.float32)


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4))), "Missing key|Unexpected key"),
        (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(Block())), "size mismatch for 0.weight"),
        (nn.Sequential(nn.Linear(4, 4)), "key_map="),
    ],
)
def test_another_state_dict_is_refused_by_name(candidate: nn.Module, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        lowtide.verify(net(), candidate, X)


def test_key_map_leads_to_other_names() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Block()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(torch.tanh(self.first(x))))

    by_prefix = lowtide.verify(net(), Renamed(), X, key_map={"0": "first", "2.0": "second"})
    by_function = lowtide.verify(
        net(), Renamed(), X, key_map=lambda key: key.replace("2.0", "second").replace("0.", "first.")
    )
    assert by_prefix.ok
    assert by_function.ok
    assert "0.weight" in {row.name for row in by_prefix.rows}

    class Scaled(Renamed):
        def __init__(self) -> None:
            super().__init__()
            self.second.register_forward_hook(lambda module, args, output: output * 1.01)

    assert lowtide.verify(net(), Scaled(), X, key_map={"0": "first", "2.0": "second"}).first_module == "2.0"


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = net()
    model.kept = model(X)  # a tensor with a graph as a plain attribute
    with pytest.raises(ArgumentError, match=r"copy\.deepcopy can copy .* detach tensors"):
        lowtide.verify(model, net(), X)


def test_modules_without_weights_yet_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ArgumentError, match="run the module once first"):
        lowtide.verify(lazy, lazy, X)
    with pytest.raises(ArgumentError, match="on meta"):
        lowtide.verify(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4), X, device="cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps to be an integer >= 1, got 0"),
        ({"forwards": 1.5}, "forwards to be an integer"),
        ({"target": X}, "loss together with target"),
        ({"dtype": torch.int64}, "a floating-point torch.dtype, got torch.int64"),
        ({"autocast": torch.float32}, "torch.bfloat16, torch.float16 or True"),
        ({"autocast": True, "dtype": torch.bfloat16}, "float32 .the weights' dtype. together with autocast"),
        ({"without": ["hook"]}, "without to be among no_grad_forward, eval, hooks, got 'hook'"),
        ({"frozen": ["nothing"]}, "names of parameters or modules, got 'nothing'"),
        ({"frozen": "0"}, "a list of names"),
        ({"optimizer": "sgd"}, "an optimiser or a callable"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        lowtide.verify(net(), net(), X, **options)


def test_something_that_is_no_callable_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a module or a callable, got int"):
        lowtide.verify(net(), 3, X)  # type: ignore[arg-type]
