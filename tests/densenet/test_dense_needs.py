"""Only the gradients that are needed are computed; without any, nothing is kept and no node is made."""

from __future__ import annotations

import pytest
import torch
import torchvision
from dense_runs import LEAN_LEVELS, assert_same, at_level, network, projection, randomise, run
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.models import densenet121, densenet161, densenet169, densenet201


def image(*shape):
    return torch.randn(shape or (3, 3, 8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("build", [densenet121, densenet161, densenet169, densenet201])
def test_image_without_gradient(build):
    """Values, not counts: every parameter's gradient equals torchvision's when the image asks for none."""
    torch.manual_seed(0)
    theirs = randomise(getattr(torchvision.models, build.__name__)(num_classes=3).double())
    ours = build(num_classes=3, recompute="layer").double()
    ours.load_state_dict(theirs.state_dict())
    x = image(2, 3, 64, 64)
    assert_same(run(ours, x, image_grad=False), run(theirs, x, image_grad=False))


FROZEN = {
    "all but the classifier": lambda name: not name.startswith("classifier"),
    "stem and first block": lambda name: "0" in name or "denseblock1" in name,
    "all gammas": lambda name: "norm" in name and name.endswith("weight"),
    "all convolutions": lambda name: "conv" in name,
    "all norms": lambda name: "norm" in name,
    "all but the last norm1": lambda name: "denseblock2.denselayer2.norm1" not in name,
    "all but one bias in the middle": lambda name: name != "features.denseblock1.denselayer2.norm2.bias",
    "all but one conv2": lambda name: name != "features.denseblock2.denselayer1.conv2.weight",
}


ONLY_WITH_BOTTLENECK = ("all but one bias in the middle", "all but one conv2")


@pytest.mark.parametrize("image_grad", [False, True])
@pytest.mark.parametrize(
    ("frozen", "bn_size"), [(f, b) for f in FROZEN for b in (4, None) if b or f not in ONLY_WITH_BOTTLENECK]
)
def test_frozen_parameters(frozen, bn_size, image_grad):
    model = network(bn_size=bn_size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    plain = run(at_level(model, "none"), image(), 2, image_grad=image_grad)
    for level in ("pointwise", "layer"):
        assert_same(run(at_level(model, level), image(), 2, image_grad=image_grad), plain)


class CountProducts(TorchDispatchMode):
    """How many matrix products and convolutions a backward runs."""

    def __init__(self):
        super().__init__()
        self.products = self.convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "bmm", "addmm_", "addmm", "baddbmm")
        self.convolutions += name == "convolution_backward"
        return func(*args, **(kwargs or {}))


def _backward_work(frozen, image_grad):
    model = at_level(network(), "pointwise").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    y = projection(model(image().requires_grad_(image_grad)), 0)
    with CountProducts() as count:
        y.backward()
    return count


def test_work_that_nobody_asked_for_is_not_done(monkeypatch):
    monkeypatch.setenv("LOWTIDE_KERNELS", "tensor")  # native passes do not go through the dispatcher that counts
    everything = _backward_work(lambda name: False, True)
    last_layer = _backward_work(lambda name: "denseblock2.denselayer2" not in name, False)
    assert 0 < last_layer.convolutions < everything.convolutions / 4
    assert 0 < last_layer.products < everything.products / 3
    no_conv1 = _backward_work(lambda name: "conv1" in name, True)
    assert no_conv1.products < everything.products


@pytest.mark.parametrize("level", LEAN_LEVELS)
@pytest.mark.parametrize("train", [True, False])
def test_nothing_is_kept_without_gradients(level, train):
    model = at_level(network(small_inputs=False), level).train(train)
    x = image(2, 3, 32, 32)
    packed = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with torch.no_grad():
            y = model(x)
        assert y.grad_fn is None
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        assert model(x).grad_fn is None
    assert not packed


def test_eval_without_gradients_does_the_work_once(monkeypatch):
    """The same products and convolutions as the plain network: nothing is made twice."""
    monkeypatch.setenv("LOWTIDE_KERNELS", "tensor")

    def products(level):
        model = at_level(network(), level).eval()
        seen = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.overloadpacket.__name__
                if name in ("convolution", "mkldnn_convolution", "_convolution"):
                    seen.append(args[0].shape[0] * args[1].numel() * args[0].shape[2:].numel())
                elif name in ("mm", "bmm"):
                    out = kwargs["out"] if kwargs and "out" in kwargs else args[0] @ args[1]
                    seen.append(out.numel() * args[0].shape[-1])
                return func(*args, **(kwargs or {}))

        with torch.no_grad(), Record():
            model(image())
        return sum(seen)

    plain = products("none")
    assert plain > 0
    for level in LEAN_LEVELS:
        assert products(level) <= plain


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_saliency_in_eval(level):
    model = network().eval()

    def saliency(level):
        leaf = image().requires_grad_()
        at_level(model, level)(leaf)[:, 1].sum().backward()
        return {"grad image": leaf.grad}

    assert_same(saliency(level), saliency("none"))
