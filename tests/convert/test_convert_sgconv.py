"""Layers of the public SGConv shape: converted in place, whatever form their kernel has, and the same afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from public_layers import PublicLayer, PublicModel
from test_convert_restore import fingerprint
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConversionError
from lowtide.nn import SGConv

FORMS: dict[str, dict[str, Any]] = {
    "cat": {},
    "sum-two_sided": {"how": ("sum", "linear", 0), "both_sides": True},
    "nearest-init_scale": {"how": ("cat", "nearest", 1)},
    "channels-gate": {"channels": 2, "gate": True, "both_sides": True},
    "power": {"power": True, "act": nn.ReLU()},
    "power_fixed-dropout": {"power": False, "drop": 0.3},
    "time_first-layer_norm": {"time_last": False, "layer_norm": True, "act": nn.SiLU()},
    "time_first-gate": {"time_last": False, "gate": True, "channels": 2},
}


def sequence() -> Tensor:
    return torch.randn(3, 21, 2, generator=torch.Generator().manual_seed(2))


def model_of(name: str) -> PublicModel:
    torch.manual_seed(1)
    return PublicModel(**FORMS[name])


@pytest.mark.parametrize("name", FORMS)
def test_a_converted_model_is_the_same(name: str) -> None:
    model, plain = model_of(name), model_of(name)
    report = lowtide.convert(model)
    assert (report.converted, report.skipped) == (("layers.0", "layers.1"), ())
    combine, _, scale = FORMS[name].get("how", ("cat", "", 0))
    assert set(report.kinds.values()) == {f"long convolution, 3 scales ({combine}), {16 * 2**scale} taps"}
    for level in ("pointwise", "layer"):
        model.set_recompute(level)
        lowtide.verify(plain, model, sequence(), steps=2).raise_if_failed()


@pytest.mark.parametrize(("scales", "length"), [(1, 3), (4, 40), (5, 1)])
def test_kernels_shorter_and_longer_than_the_input(scales: int, length: int) -> None:
    torch.manual_seed(1)
    plain = PublicLayer(scales=scales, both_sides=True).double()
    layer = copy.deepcopy(plain)
    lowtide.convert(layer)
    u = torch.randn(2, 5, length, dtype=torch.float64)
    for _ in range(2):  # the first forward makes the norm
        torch.testing.assert_close(layer(u)[0], plain(u)[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(layer.named_buffers()), dict(plain.named_buffers()), rtol=1e-12, atol=0)
    assert layer.kernel_norm_initialized


def test_its_weights_load_into_the_layer_of_lowtide() -> None:
    torch.manual_seed(1)
    layer = PublicLayer(both_sides=True)
    lowtide.convert(layer)
    ours = SGConv(5, 16, kernel_dim=4, bidirectional=True)
    ours.load_public(layer.state_dict())
    u = torch.randn(2, 5, 21)
    torch.testing.assert_close(layer(u)[0], ours(u), rtol=1e-5, atol=1e-5)


def test_restore_copies_and_pickles() -> None:
    model = model_of("cat")
    before = fingerprint(model)
    lowtide.convert(model, recompute="layer")
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, pickled):
        nn.init.zeros_(other.decoder.weight)
        nn.init.zeros_(other.decoder.bias)
        assert not other(sequence()).any()
    lowtide.restore(model)
    assert fingerprint(model) == before
    assert model(sequence()).any()


def test_less_is_kept() -> None:
    kept = []
    for level in ("none", "pointwise", "layer"):
        torch.manual_seed(0)
        layer = PublicLayer(features=8, both_sides=True)
        lowtide.convert(layer, recompute=level)
        u = torch.randn(2, 8, 256)
        layer(u)
        kept.append(lowtide.measure(lambda x, f=layer: f(x)[0], u, repeats=1).saved_bytes - u.nbytes)
    parameters = sum(t.nbytes for t in [*layer.parameters(), *layer.buffers()])
    # the input, which is the caller's, and at "pointwise" one map more
    assert 0 <= kept[2] <= parameters
    assert u.nbytes <= kept[1] <= u.nbytes + parameters
    assert kept[0] > 4 * u.nbytes


def test_the_kernel_on_request_and_hooks_run_the_plain_way() -> None:
    layer = PublicLayer()
    lowtide.convert(layer)
    u = torch.randn(2, 5, 21)
    y, k = layer(u, return_kernel=True)
    assert k.shape == (1, 5, 21)
    torch.testing.assert_close(layer(u)[0], y, rtol=1e-4, atol=1e-5)
    seen: list[int] = []
    layer.activation.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match=r"PublicLayer runs in ordinary autograd.*: activation has a hook"):
        layer(u)
    assert seen == [1]


class Scaled(PublicLayer):
    def forward(self, u: Tensor, return_kernel: bool = False) -> Any:
        y, k = super().forward(u, return_kernel)
        return y * 1.01, k


class OneSideShifted(PublicLayer):
    """Its kernel into the future is off by one."""

    def forward(self, u: Tensor, return_kernel: bool = False) -> Any:
        y, k = super().forward(u, return_kernel)
        return torch.roll(y, 1, -1), k


class DetachedSkip(PublicLayer):
    """The right output, and no gradient for the skip."""

    def forward(self, u: Tensor, return_kernel: bool = False) -> Any:
        skip, self._parameters["D"] = self._parameters["D"], self._parameters["D"].detach()
        try:
            return super().forward(u, return_kernel)
        finally:
            self._parameters["D"] = skip


def with_tied_skip() -> nn.Module:
    model = model_of("cat")
    model.layers[1].D = model.layers[0].D
    return model


def with_weight_norm() -> nn.Module:
    model = model_of("cat")
    for layer in model.layers:
        layer.output_linear = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "scaled": (lambda: Scaled(), "none of 40 forms of SGConv gives its output"),
    "shifted": (lambda: OneSideShifted(both_sides=True), "none of 40 forms"),
    "detached": (lambda: DetachedSkip(), "in training the gradient of inner.D is missing"),
    "mish": (lambda: PublicLayer(act=nn.Mish()), "activation is Mish"),
    "gelu-tanh": (lambda: PublicLayer(act=nn.GELU("tanh")), "activation is GELU"),
    "dropout-time-first": (lambda: PublicLayer(time_last=False, drop=0.3), "in training the output differs"),
    "tied": (with_tied_skip, "D is tied: it is also layers.1.D"),
    "weight-norm": (with_weight_norm, "output_linear is no plain map"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_such_a_layer_is_left_untouched(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    before = fingerprint(model)
    with pytest.raises(ConversionError, match=reason) as caught:
        lowtide.convert(model)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before


def test_a_layer_of_lowtide_is_lean_already() -> None:
    report = lowtide.convert(nn.Sequential(SGConv(4, 16, kernel_dim=4)), strict=False)
    assert report.skipped == (("0", "it is lean already: set_recompute changes its level"),)
