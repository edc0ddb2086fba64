"""What is not converted is named with its reason, and the model is then as it was."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from networks import monai_densenet, resnet, torchvision_densenet
from test_convert_restore import fingerprint
from torch import nn
from torch.nn.utils import parametrizations

import lowtide
from lowtide.errors import ArgumentError, ConversionError
from lowtide.models import densenet_bc
from lowtide.nn.batch_norm import SyncBatchNorm


def small() -> nn.Module:
    return torchvision_densenet()[0]


def with_shared_module() -> nn.Module:
    model = small()
    model.features.denseblock1.denselayer2.norm2 = model.features.denseblock1.denselayer1.norm2
    return model


def with_tied_weight() -> nn.Module:
    model = small()
    first, second = model.features.denseblock1.denselayer1, model.features.denseblock1.denselayer2
    second.conv2.weight = first.conv2.weight
    return model


def with_hook() -> nn.Module:
    model = small()
    model.features.denseblock1.denselayer2.relu1.register_forward_hook(lambda module, args, output: None)
    return model


def with_parametrization() -> nn.Module:
    model = small()
    parametrizations.weight_norm(model.features.denseblock1.denselayer1.conv1)
    return model


def with_replaced_activation() -> nn.Module:
    model = small()
    model.features.denseblock1.denselayer1.relu2 = nn.GELU()
    return model


def with_own_forward() -> nn.Module:
    model = small()
    block = model.features.denseblock1
    block.forward = lambda x: torch.cat([layer(x) for layer in block.values()], 1)
    return model


def with_scaled_layer() -> nn.Module:
    """All parts are those of a dense block; the forward around them is not."""
    model = small()

    class Scaled(type(model.features.denseblock1)):
        def forward(self, init_features: torch.Tensor) -> torch.Tensor:
            return super().forward(init_features) * 1.01

    model.features.denseblock1.__class__ = Scaled
    return model


def with_a_closure() -> nn.Module:
    """Its copies would still call the original's layers."""
    model = small()
    block = model.features.denseblock1
    original = block.denselayer1

    class Calls(type(block)):
        def forward(self, init_features: torch.Tensor) -> torch.Tensor:
            original.norm1.num_batches_tracked.add_(1)
            return super().forward(init_features)

    block.__class__ = Calls
    return model


REFUSED: dict[Callable[[], nn.Module], str] = {
    with_shared_module: r"denselayer1.norm2 is shared: it is also features.denseblock1.denselayer2.norm2",
    with_tied_weight: r"denselayer1.conv2.weight is tied: it is also features.denseblock1.denselayer2.conv2.weight",
    with_hook: r"denselayer2.relu1 has a hook",
    with_parametrization: r"denselayer1.conv1 is a ParametrizedConv2d, not a convolution",
    with_replaced_activation: r"denselayer1.relu2 is a GELU, not a ReLU; lean blocks take batch norm, ReLU",
    with_own_forward: r"a forward of its own",
    with_a_closure: r"a copy of it changes the original's buffers",
    with_scaled_layer: r"in training the output differs from the lean block's by",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_one_block_is_left_and_the_others_are_converted(make: Callable[[], nn.Module]) -> None:
    model = make()
    report = lowtide.convert(model)
    reasons = dict(report.skipped)
    assert re.search(REFUSED[make], reasons["features.denseblock1"])
    assert list(reasons) == ["features.denseblock1"]
    assert "features.denseblock2" in report.converted
    assert "features.denseblock1: left as it is: " in str(report)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_refused_model_is_untouched(make: Callable[[], nn.Module]) -> None:
    model = make()
    # the refused block alone, so that nothing is left to convert
    block = model.features.denseblock1
    before = fingerprint(block)
    with pytest.raises(ConversionError, match="convert: expected something to convert, got "):
        lowtide.convert(block)
    assert fingerprint(block) == before
    report = lowtide.convert(block, strict=False)
    assert (report.converted, len(report.skipped)) == ((), 1)
    assert fingerprint(block) == before


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("instance", "norm1 is a InstanceNorm2d, not a batch norm; lean blocks take batch norm"),
        (("group", {"num_groups": 4}), "norm1 is a GroupNorm, not a batch norm; lean blocks take batch norm"),
    ],
)
def test_an_unsupported_norm_is_named(norm: object, reason: str) -> None:
    model, _ = monai_densenet(2, norm=norm)
    before = fingerprint(model)
    with pytest.raises(ConversionError, match=re.escape(reason)) as caught:
        lowtide.convert(model)
    assert 'scope="all"' in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before


def test_norms_without_lean_form_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    report = lowtide.convert(nn.SyncBatchNorm.convert_sync_batchnorm(model), scope="all", strict=False)
    assert [name for name, _ in report.skipped] == ["1", "3"]
    assert "LocalResponseNorm is no norm with a lean form" in report.skipped[0].reason
    assert "SyncBatchNorm is no norm with a lean form (batch norm of one process" in report.skipped[1].reason
    report = lowtide.convert(nn.Sequential(SyncBatchNorm(4)), scope="all", strict=False)
    assert [name for name, _ in report.skipped] == ["0"]


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: lowtide.convert(small(), recompute="leyer"), ArgumentError, "recompute to be one of none, pointwise"),
        (lambda: lowtide.convert(small(), scope="al"), ArgumentError, "scope to be one of blocks, all, got 'al'"),
        (lambda: lowtide.convert([small()]), ArgumentError, "expected a torch.nn.Module, got list"),
        (lambda: lowtide.convert(resnet()[0]), ConversionError, "got a ResNet without dense blocks"),
        (lambda: lowtide.restore(small()), ConversionError, "a model that lowtide.convert converted, got a DenseNet"),
        (lambda: lowtide.convert(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))), ConversionError, "scripted"),
        (lambda: lowtide.convert(torch.compile(small())), ConversionError, "compiled"),
        (lambda: lowtide.convert(densenet_bc(10, 4)), ConversionError, "lean already"),
    ],
)
def test_wrong_calls(call: Callable[[], object], kind: type[Exception], message: str) -> None:

    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_converting_twice_is_refused() -> None:
    model = small()
    lowtide.convert(model)
    with pytest.raises(ConversionError, match="set_recompute"):
        lowtide.convert(model, recompute="layer")
    model.set_recompute("layer")
    with pytest.raises(ArgumentError, match="recompute"):
        model.set_recompute("leyer")


def test_a_part_that_is_hooked_or_replaced_later_runs_the_plain_way_with_one_warning() -> None:
    model, x = torchvision_densenet()
    lowtide.convert(model)
    seen = []
    layer = model.features.denseblock2.denselayer1
    handle = layer.conv1.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with pytest.warns(UserWarning, match=r"denselayer1.conv1 has a hook"):
        model(x)
    model(x)
    assert len(seen) == 2
    handle.remove()
    model(x)
    assert len(seen) == 2
    model.features.denseblock3.denselayer1.relu1 = nn.GELU()
    with pytest.warns(UserWarning, match=r"denselayer1.relu1 is a GELU"):
        model(x)
