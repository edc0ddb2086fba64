"""Every planted fault is rejected with its kind and its module, and the right version beside it passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import control_conv as conv
import control_dense as dense
import pytest
import torch
from torch import nn

import lowtide

IMAGE = (4, 3, 6, 6)


@dataclass(frozen=True)
class Fault:
    """`kinds` is exactly the set of failure kinds; `names`, where given, exactly the failing tensors in order."""

    name: str
    reference: Callable[[], nn.Module]
    candidate: Callable[[], nn.Module]
    shape: tuple[int, ...]
    kinds: set[str]
    module: str | None
    names: tuple[str, ...] = ()
    dtype: str = "float64"
    options: dict = field(default_factory=dict)


def dense_fault(
    name: str,
    layer: type[dense.Layer],
    kinds: set[str],
    module: str | None,
    names: tuple[str, ...] = (),
    *,
    dropout: float = 0.0,
    at: int | None = 1,
) -> Fault:
    plain = dense.SineLayer if layer is dense.OtherRandomState else dense.Layer
    return Fault(
        name,
        lambda: dense.DenseNet(plain, at, dropout),
        lambda: dense.DenseNet(layer, at, dropout),
        IMAGE,
        kinds,
        module,
        names,
    )


def conv_fault(name: str, kind: type[conv.LongConv], kinds: set[str], names=()) -> Fault:
    return Fault(name, conv.ConvNet, lambda: conv.ConvNet(kind), (2, 3, 20), kinds, "conv", names)


def vector_fault(name: str, kind: type[conv.Affine], kinds: set[str], names=(), **options) -> Fault:
    return Fault(name, conv.VectorNet, lambda: conv.VectorNet(kind), (6, 6), kinds, "affine", names, "float32", options)


def statistics_of(layer: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.norm1.{buffer}" for buffer in ("running_mean", "running_var", "num_batches_tracked"))


FAULTS = [
    dense_fault(
        "statistics updated twice",
        dense.StatisticsTwice,
        {"buffer", "eval_output"},
        "layers.1.norm1",
        (*statistics_of(1), "output"),
    ),
    dense_fault(
        "statistics not updated",
        dense.StatisticsNever,
        {"buffer", "eval_output"},
        "layers.1.norm1",
        (*statistics_of(1), "output"),
    ),
    dense_fault(
        "statistics updated only in the recompute",
        dense.StatisticsInRecompute,
        {"buffer", "eval_output"},  # a forward under no_grad never updates
        "layers.1.norm1",
        (*statistics_of(1), "output"),
    ),
    dense_fault(
        "weight gradient dropped",
        dense.WeightGradientDropped,
        {"missing_grad"},
        "layers.1.conv1",
        ("layers.1.conv1.weight",),
    ),
    dense_fault(
        "weight gradient scaled by 1.01",
        dense.WeightGradientScaled,
        {"param_grad"},
        "layers.1.conv1",
        ("layers.1.conv1.weight",),
    ),
    dense_fault(
        "saved input overwritten by the next layer",
        dense.SharedWorkspace,
        {"param_grad"},
        "layers.1.conv1",
        ("layers.0.conv1.weight", "layers.1.conv1.weight"),
        at=None,
    ),
    dense_fault(
        "batch norm backward without its mean term",
        dense.NormWithoutMeanTerm,
        {"param_grad", "input_grad"},
        "layers.1.norm2",
    ),
    dense_fault(
        "recompute under another random state",
        dense.OtherRandomState,
        {"param_grad", "input_grad", "rng"},
        "layers.1.dropout",
        dropout=0.3,
    ),
    dense_fault(
        "recompute in another dtype",
        dense.RecomputeInHalf,
        {"param_grad", "input_grad"},
        "layers.1",
    ),
    dense_fault(
        "backward called inside a recompute",
        dense.BackwardInsideRecompute,
        {"param_grad", "input_grad"},
        "layers.1",
    ),
    dense_fault(
        "batch statistics in eval mode",
        dense.EvalWithBatchStatistics,
        {"eval_output"},
        "layers.1",  # norm1 itself is not called
        ("output",),
    ),
    dense_fault("one more random number", dense.DrawsOneMore, {"rng"}, "layers.1", ("torch generator",)),
    dense_fault("an exception", dense.Raises, {"error"}, "layers.1", ("layers.1",)),
    Fault("output detached", dense.DenseNet, dense.DetachedNet, IMAGE, {"requires_grad"}, "", ("output",)),
    Fault(
        "in-place ReLU under a hook",
        dense.DenseNet,
        dense.InPlaceNet,
        IMAGE,
        {"hook"},
        "norm5",
        ("InPlaceNet", "norm5"),
    ),
    Fault(
        "reentrant checkpoint around the stem",
        dense.DenseNet,
        dense.ReentrantStem,
        IMAGE,
        {"missing_grad"},
        "conv0",
        ("conv0.weight",),
    ),
    conv_fault("conj missing in the backward", conv.NoConj, {"param_grad", "input_grad"}),
    conv_fault("transform of length L", conv.WrapAround, {"output"}, ("output",)),
    conv_fault("reverse kernel off by one", conv.ReverseOffByOne, {"output"}, ("output",)),
    conv_fault("last tile skipped", conv.LastTileSkipped, {"output"}, ("output",)),
    vector_fault("float32 pass: tail skipped", conv.TailSkipped, {"output"}, ("output",)),
    vector_fault("float32 pass: wrong lane", conv.WrongLane, {"output"}, ("output",)),
    vector_fault("float32 pass: race", conv.Race, {"param_grad"}, ("affine.scale",)),
    Fault(
        "in-place change of an input",
        conv.SquashNet,
        lambda: conv.SquashNet(conv.SquashInPlace),
        (4, 6),
        {"input_changed"},
        "squash",
        ("input",),
    ),
]

RIGHT = [
    ("hand-written convolution", dense.DenseNet, lambda: dense.DenseNet(dense.RightByHand), IMAGE),
    ("recompute", dense.DenseNet, lambda: dense.DenseNet(dense.RightRecompute), IMAGE),
    ("FFT", conv.ConvNet, lambda: conv.ConvNet(conv.FFTConv), (2, 3, 20)),
    ("vector pass", conv.VectorNet, lambda: conv.VectorNet(conv.VectorAffine), (6, 6)),
]


def make(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = factory()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # not 1 and 0, which hide a missing factor
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_fault_is_rejected_with_its_kind_and_module(fault: Fault) -> None:
    x = torch.randn(fault.shape, generator=torch.Generator().manual_seed(5))
    report = lowtide.verify(make(fault.reference, 1), make(fault.candidate, 2), x, **fault.options)
    assert not report.ok
    assert {f.kind for f in report.failures} == fault.kinds, str(report)
    assert report.first_module == fault.module, str(report)
    assert all(f.dtype == fault.dtype for f in report.failures)
    if fault.names:
        assert tuple(dict.fromkeys(f.name for f in report.failures)) == fault.names
    with pytest.raises(lowtide.LowtideError, match="FAILED"):
        report.raise_if_failed()


@pytest.mark.parametrize(("name", "reference", "candidate", "shape"), RIGHT, ids=[row[0] for row in RIGHT])
def test_right_version_of_the_same_code_passes(name, reference, candidate, shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    lowtide.verify(make(reference, 1), make(candidate, 2), x).raise_if_failed()


def test_there_are_as_many_controls_as_promised() -> None:
    assert len(FAULTS) >= 18
    assert {kind for fault in FAULTS for kind in fault.kinds} >= {
        "output", "input_grad", "param_grad", "missing_grad", "buffer", "eval_output", "rng", "requires_grad",
        "input_changed", "hook", "error",
    }  # fmt: skip
