"""Norm - activation - convolution: the lean steps against their plain twins, and what they keep."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.functional import norm_act_conv
from lowtide.lean import norm_act_conv as lean
from lowtide.lean import remade
from lowtide.parts import BatchNorm
from lowtide.reference import norm_act_conv as plain
from lowtide.steps import Activation, Conv, Function, GroupNorm, InstanceNorm, MaxPool

C = 8
NORMS = ("batch", "batch-frozen", "batch-untracked", "instance", "instance-tracked", "instance-frozen", "group", None)
SIZES = {1: (20,), 2: (9, 10), 3: (5, 6, 4)}


@dataclass
class Case:
    x: Tensor
    norm: Any
    act: Activation | None
    tail: Any
    parameters: list[Tensor]
    buffers: list[Tensor]


def make(norm: str | None, act: str | None, tail: str | None, dims: int, dtype: torch.dtype = torch.float64) -> Case:
    """The same numbers at every call."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = draw(3, C, *SIZES[dims]) * 2 + 0.5
    weight, bias = draw(C).requires_grad_(), draw(C).requires_grad_()
    mean, var, count = draw(C), draw(C).square() + 0.5, torch.tensor(3)
    parameters = [weight, bias]
    described: Any = None
    buffers: list[Tensor] = []
    match norm:
        case "batch" | "batch-frozen":
            buffers = [mean, var, count]
            described = BatchNorm(weight, bias, *buffers, momentum=0.2, training=norm == "batch")
        case "batch-untracked":
            parameters, described = [], BatchNorm(None, None, None, None)
        case "instance":
            described = InstanceNorm(weight, bias)
        case "instance-tracked" | "instance-frozen":
            buffers = [mean, var]
            described = InstanceNorm(weight, bias, mean, var, training=norm == "instance-tracked")
        case "group":
            described = GroupNorm(4, weight, bias)
        case _:
            parameters = []
    slopes = draw(C).requires_grad_()
    activation = None
    if act is not None:
        is_prelu = act == "prelu"
        activation = Activation(act, slope=0.2, weight=slopes if is_prelu else None)  # type: ignore[arg-type]
        parameters += [slopes] if is_prelu else []
    kernel, out_bias = draw(C, C // 2, *(3,) * dims).requires_grad_(), draw(C).requires_grad_()
    ones, twos = (1,) * dims, (2,) * dims
    last: Any = None
    match tail:
        case "conv":
            last = Conv(kernel, out_bias, twos, ones, ones, groups=2)
        case "transposed":
            last = Conv(kernel, out_bias, twos, ones, ones, True, ones, 2)
        case "pool":
            last = MaxPool((3,) * dims, twos, ones, ones)
    parameters += [kernel, out_bias] if isinstance(last, Conv) else []
    return Case(x.requires_grad_(), described, activation, last, parameters, buffers)


def run(function: Any, case: Case, autocast: bool = False) -> list[Tensor]:
    """Output, gradients of the input and of every parameter, buffers."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = function(case.x, case.norm, case.act, case.tail)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [case.x, *case.parameters], weights), *case.buffers]


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)]


COMBINATIONS = [
    (norm, act, ("conv", "transposed", "pool", None)[(i + j) % 4], 1 + (i + j) % 3, (i + j) % 5 == 0)
    for i, norm in enumerate(NORMS)
    for j, act in enumerate((*get_args(Function), None))
    if (norm, act) != (None, None)
]


@pytest.mark.parametrize(("norm", "act", "tail", "dims", "channels_last"), COMBINATIONS)
def test_values_and_gradients(
    norm: str | None, act: str | None, tail: str | None, dims: int, channels_last: bool
) -> None:
    results = []
    for function in (lean.norm_act_conv, plain.norm_act_conv):
        case = make(norm, act, tail, dims)
        if channels_last and dims > 1:
            order = torch.channels_last if dims == 2 else torch.channels_last_3d
            case.x = case.x.detach().contiguous(memory_format=order).requires_grad_()
        results.append(run(function, case))
    assert max(relative_errors(*results)) < 1e-12


def with_one_slope(dtype: torch.dtype = torch.float64) -> Case:
    """prelu with one slope for all channels, as `nn.PReLU()` has it."""
    case = make("batch", "prelu", "conv", 2, dtype)
    slope = torch.tensor([-0.3], dtype=dtype, requires_grad=True)
    case.parameters[2], case.act = slope, Activation("prelu", weight=slope)
    return case


def test_prelu_with_one_slope() -> None:
    expected = run(plain.norm_act_conv, with_one_slope())
    assert max(relative_errors(run(lean.norm_act_conv, with_one_slope()), expected)) < 1e-12
    ours, theirs = (run(f.norm_act_conv, with_one_slope(torch.float32)) for f in (lean, plain))
    for mine, other, true in zip(ours, theirs, expected, strict=True):
        error, allowed = (mine.double() - true).norm(), 2 * (other.double() - true).norm()
        assert error <= allowed + 4 * torch.finfo(torch.float32).eps * true.double().norm()


def test_the_comparison_would_see_a_wrong_answer() -> None:
    expected = run(plain.norm_act_conv, make("batch", "silu", "conv", 2))
    for factor in (0.0, -1.0, 1.01):
        assert min(relative_errors([t * factor for t in expected[:-1]], expected[:-1])) > 1e-3


def wrong_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm made again without its mean."""
    original = remade.FixedNorm._scaled
    monkeypatch.setattr(remade.FixedNorm, "_scaled", lambda self, x, w, b: original(self, x - 0.01, w, b))


def stale_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation that the mark forgets."""
    monkeypatch.setattr(lean, "mark", lambda tensor, made: remade.mark(tensor, remade.Made(made.base, made.norm)))


def wrong_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lean.activation_backward
    monkeypatch.setattr(lean, "activation_backward", lambda g, z, act: original(g, z + 0.01, act))


def batch_gradient_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch statistics taken for constants."""
    from lowtide.lean import normalise

    original = normalise._batch_backward

    def cut(dz: Tensor, x: Tensor, fixed: Any, norm: Any, needs: Any) -> Any:
        _, dgamma, dbeta = original(dz, x, fixed, norm, needs)
        scale = fixed.spread * norm.weight
        return dz * scale.view(1, -1, *[1] * (x.dim() - 2)), dgamma, dbeta

    monkeypatch.setattr(normalise, "_batch_backward", cut)


@pytest.mark.parametrize("plant", [wrong_statistics, stale_mark, wrong_slope, batch_gradient_cut])
def test_planted_faults_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(plain.norm_act_conv, make("batch", "silu", "conv", 2))
    assert max(relative_errors(run(lean.norm_act_conv, make("batch", "silu", "conv", 2)), expected)) < 1e-12
    plant(monkeypatch)
    assert max(relative_errors(run(lean.norm_act_conv, make("batch", "silu", "conv", 2)), expected)) > 1e-6


@pytest.mark.parametrize("norm", ["batch", "batch-frozen", "instance", "group"])
def test_autocast_is_no_worse_than_plain(norm: str) -> None:
    oracle = run(plain.norm_act_conv, make(norm, "prelu", "conv", 2))
    ours, theirs = (
        run(f, make(norm, "prelu", "conv", 2, torch.float32), autocast=True)
        for f in (lean.norm_act_conv, plain.norm_act_conv)
    )
    for mine, other, true in zip(ours, theirs, oracle, strict=True):
        assert mine.dtype == other.dtype
        error, allowed = (mine.double() - true).norm(), 2 * (other.double() - true).norm()
        assert error <= allowed + 4 * torch.finfo(torch.float32).eps * true.double().norm()


def kept_bytes(case: Case, function: Any = lean.norm_act_conv) -> int:
    """Bytes of the storages that nodes keep, parameters excepted."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(case.x, case.norm, case.act, case.tail)
    assert out.requires_grad
    parameters = {p.untyped_storage().data_ptr() for p in case.parameters}
    return sum(size for address, size in kept.items() if address not in parameters)


@pytest.mark.parametrize(
    ("norm", "vectors"),
    [("batch", 2 * C), ("batch-frozen", 2 * C), ("instance", 2 * 3 * C), ("group", 2 * 3 * 4), (None, 0)],
)
@pytest.mark.parametrize("act", ["relu", "prelu", "gelu"])
def test_one_map_is_kept(norm: str | None, vectors: int, act: str) -> None:
    case = make(norm, act, "conv", 2)
    maps = {"relu": 1, "prelu": 2, "gelu": 2}[act] + (norm is not None)
    size = case.x.numel() * 8
    assert kept_bytes(case) == size + vectors * 8
    plain_vectors = kept_bytes(make(norm, act, "conv", 2), plain.norm_act_conv) - maps * size
    assert 0 <= plain_vectors <= 6 * 3 * C * 8


def test_a_concatenation_of_maps_that_can_be_made_again_is_not_kept() -> None:
    case = make("batch", "relu", "conv", 2)
    a = lean.activate(lean.normalise(case.x, case.norm), Activation("silu"))
    b = lean.activate(lean.normalise(case.x, case.norm), Activation("relu"))
    joined = lean.concatenate([a, b])
    made = remade.made_of(joined)
    assert made is not None
    assert torch.equal(made.again(), joined)
    assert remade.made_of(lean.concatenate([case.x, case.x * 2])) is None


class Skip(nn.Module):
    """A map that a strided convolution reads, beside one that nobody keeps; both go into a third convolution."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, C, 3, padding=1), nn.Conv2d(C, 2 * C, 2, stride=2)
        self.up, self.last = nn.ConvTranspose2d(2 * C, C, 2, stride=2), nn.Conv2d(2 * C, 5, 3, padding=1)
        self.norm, self.change = nn.BatchNorm2d(C), change

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x) + 1
        up = self.up(self.down(skip)) * 2
        if self.change == "before":
            skip = skip * 1
        out = self.last(torch.cat([up, skip], 1))
        if self.change == "after":
            up.mul_(3)
        return out + up.sum()


def test_a_map_that_a_convolution_keeps_is_not_kept_again_in_a_concatenation() -> None:
    x = torch.randn(2, 3, 6, 6)
    skip, down, image = 2 * C * 36 * 4, 2 * 2 * C * 9 * 4, x.numel() * 4
    for change, scope, maps in (
        ("", "all", skip + down + skip),
        ("", "blocks", skip + down + 2 * skip),
        ("before", "all", skip + down + 2 * skip),
    ):
        model = Skip(change)
        if scope == "all":
            lowtide.convert(model, scope="all")
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(x)
        assert out.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert sum(size for at, size in kept.items() if at not in weights) == maps + image


def test_a_map_may_change_in_place_after_its_concatenation() -> None:
    torch.manual_seed(0)
    original = Skip("after").double()
    model = copy.deepcopy(original)
    lowtide.convert(model, scope="all")
    lowtide.verify(original, model, torch.randn(2, 3, 6, 6), steps=2).raise_if_failed()


def test_a_map_changed_in_place_is_kept_as_it_is_then() -> None:
    case, other = make("batch", "silu", "conv", 2), make("batch", "silu", "conv", 2)
    y = lean.activate(lean.normalise(case.x, case.norm), case.act)
    assert remade.made_of(y) is not None
    y.mul_(3)
    assert remade.made_of(y) is None
    expected = plain.convolve(plain.activate(plain.normalise(other.x, other.norm), other.act) * 3, other.tail)
    out = lean.convolve(y, case.tail)
    grads = [torch.autograd.grad(o.square().sum(), [c.x, *c.parameters]) for o, c in ((out, case), (expected, other))]
    assert max(relative_errors(list(grads[0]), list(grads[1]))) < 1e-12


def test_in_place_activation_takes_the_input_s_memory_and_gives_its_gradient() -> None:
    results = []
    for functions in (lean, plain):
        case = make("batch", None, "conv", 2)
        z = functions.normalise(case.x, case.norm)
        y = functions.activate(z, Activation("relu", inplace=True))
        assert y is z
        assert not (z < 0).any()
        results.append(
            list(torch.autograd.grad(functions.convolve(z, case.tail).square().sum(), [case.x, *case.parameters]))
        )
    assert max(relative_errors(*results)) < 1e-12


def test_tensors_between_the_steps_may_be_hooked_and_asked_for_their_gradient() -> None:
    results = []
    for functions in (lean, plain):
        case = make("batch", "silu", "conv", 2)
        z = functions.normalise(case.x, case.norm)
        y = functions.activate(z, case.act)
        out = functions.convolve(y, case.tail).square().sum() + (y * y).sum() + z.sum()
        results.append(list(torch.autograd.grad(out, [y, z, case.x])))
    assert max(relative_errors(*results)) < 1e-12


def test_frozen_parameters_get_no_gradient_and_the_others_theirs() -> None:
    for frozen in range(5):
        results = []
        for function in (lean.norm_act_conv, plain.norm_act_conv):
            case = make("batch", "prelu", "conv", 2)
            case.parameters[frozen].requires_grad_(False)
            leaves = [case.x, *(p for p in case.parameters if p.requires_grad)]
            out = function(case.x, case.norm, case.act, case.tail)
            results.append(list(torch.autograd.grad(out.square().sum(), leaves)))
        assert max(relative_errors(*results)) < 1e-12


def test_refusals() -> None:
    case = make("batch", "relu", "conv", 2)
    out = norm_act_conv(case.x, case.norm, case.act, case.tail)
    with pytest.raises(UnsupportedError, match='double backward needs recompute="none"'):
        torch.autograd.grad(out.sum(), case.x, create_graph=True)
    with pytest.raises(ArgumentError, match="more than 1 value per channel"):
        norm_act_conv(case.x[:1, :, :1, :1], case.norm, case.act, None)
    with pytest.raises(ArgumentError, match="recompute to be one of"):
        norm_act_conv(case.x, case.norm, case.act, case.tail, recompute="most")  # type: ignore[arg-type]
    assert (
        norm_act_conv(case.x, case.norm, case.act, case.tail, recompute="none").grad_fn.name() == "ConvolutionBackward0"
    )
