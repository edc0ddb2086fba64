"""float32, bfloat16 and autocast against the float64 oracle: never more than twice plain's own error.

    outputs, buffers   error(ours) <= 2 * error(plain in the same dtype) + 4 * eps * scale
    gradients          the same, where no ReLU input of the oracle is within 100 eps of its scale of the kink: nearer, a
                       change of rounding may flip it, and then plain differs from plain

Every step starts from the oracle's weights and buffers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from dense_runs import LEAN_LEVELS, at_level, network, projection
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = (4, 3, 8, 8)


def kink_margin(model, x):
    """Smallest |ReLU input| over its root mean square, in the oracle."""
    margins = []
    oracle = at_level(model, "none").train()
    for module in oracle.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(lambda m, z: margins.append(_margin(z[0])))
    oracle.features.norm5.register_forward_hook(lambda m, i, z: margins.append(_margin(z)))
    oracle(x)
    assert len(margins) == 2 * 5 + 1 + 1
    return min(margins)


def _margin(z):
    return (z.abs().min() / z.square().mean().sqrt()).item()


def step(model, x, dtype, *, autocast=False):
    """Outputs, buffers and gradients of one step of a copy in `dtype`, or in float32 under bfloat16 autocast."""
    model = at_level(model, model.features.recompute).to(torch.float32 if autocast else dtype).train()
    leaf = x.detach().clone().to(torch.float32 if autocast else dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(leaf)
    projection(y.double(), 0).backward()
    seen = {"output": y.detach(), "grad image": leaf.grad}
    seen |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b for name, b in model.named_buffers() if b.is_floating_point()}
    return seen


def rule(ours, plain, oracle, eps, kinds):
    """Names that break the rule."""
    largest = max(v.norm().item() for k, v in oracle.items() if k.startswith("grad"))
    broken = []
    for name, true in oracle.items():
        if not name.startswith(kinds):
            continue
        scale = true.norm().item()
        if name.startswith("grad") and scale < 1e-10 * largest:
            scale = largest
        allowed = 2 * (plain[name].double() - true).norm().item() + 4 * eps * scale
        error = (ours[name].double() - true).norm().item()
        if not error <= allowed:
            broken.append(f"{name}: {error:.2e} > {allowed:.2e} (scale {scale:.1e})")
    return broken


def far_from_kinks(seed):
    """gamma small, beta far from zero: no ReLU input comes near the kink even in bfloat16."""
    model = network(seed)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, 0.02, 0.04)
            with torch.no_grad():
                module.bias.copy_(torch.where(torch.rand(len(module.bias)) < 0.25, -1.0, 1.0))
    return model


def decidable(build, eps, first=0):
    """The first seed whose oracle keeps its distance from every kink."""
    for seed in range(first, first + 40):
        model = build(seed)
        x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        # the weights that the low precision sees are the rounded ones: the oracle has them too
        dtype = {2**-23: torch.float32, 2**-7: torch.bfloat16}[eps]
        model, x = model.to(dtype).double(), x.to(dtype).double()
        if kink_margin(model, x) > 100 * eps:
            model.seed = seed
            return model, x
    raise AssertionError("no seed keeps its distance")


@pytest.fixture(scope="module", params=["planes", "channels_last"])
def order(request):
    return torch.contiguous_format if request.param == "planes" else torch.channels_last


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_float32(level, order):
    eps = 2**-23
    model, x = decidable(network, eps)
    x = x.contiguous(memory_format=order)
    oracle = step(at_level(model, "none"), x, torch.float64)
    plain = step(at_level(model, "none"), x, torch.float32)
    ours = step(at_level(model, level), x, torch.float32)
    assert not rule(ours, plain, oracle, eps, ("output", "buffer", "grad"))
    assert_can_fail(ours, plain, oracle, eps)


def assert_can_fail(ours, plain, oracle, eps):
    for name, value in ours.items():
        for factor in (0.0, -1.0, 1 + 1000 * eps):
            wrong = ours | {name: value * factor}
            if value.norm() > 1e-6:
                assert rule(wrong, plain, oracle, eps, (name,)), f"{name} times {factor} passes"


DRAWS = 12


@pytest.fixture(scope="module", params=["bfloat16", "autocast"])
def bfloat16_runs(request):
    """Oracle, plain and each level on a dozen networks and images, stacked: one draw of a few numbers says little.

    The margin is 100 eps of bfloat16, 0.8 of the scale.
    """
    autocast = request.param == "autocast"
    eps = 2**-7
    draws: dict[str, list] = {}
    seed = 0
    for _ in range(DRAWS):
        model, x = decidable(far_from_kinks, eps, seed)
        seed = model.seed + 1
        for name in ("oracle", "none", *LEAN_LEVELS):
            dtype = torch.float64 if name == "oracle" else torch.bfloat16
            level = "none" if name == "oracle" else name
            seen = step(at_level(model, level), x, dtype, autocast=autocast and name != "oracle")
            draws.setdefault(name, []).append(seen)
    dtypes = {name: [{k: v.dtype for k, v in seen.items()} for seen in runs] for name, runs in draws.items()}
    assert all(dtypes[level] == dtypes["none"] for level in LEAN_LEVELS)
    return {
        name: {key: torch.stack([seen[key].double() for seen in runs]) for key in runs[0]}
        for name, runs in draws.items()
    }


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_bfloat16(level, bfloat16_runs):
    runs = bfloat16_runs
    assert not rule(runs[level], runs["none"], runs["oracle"], 2**-7, ("output", "buffer", "grad"))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_bfloat16_outputs_and_buffers_near_kinks(level, autocast):
    eps = 2**-7
    model = network().to(torch.bfloat16).double()
    x = torch.randn(SHAPE).bfloat16().double()
    oracle = step(at_level(model, "none"), x, torch.float64)
    plain = step(at_level(model, "none"), x, torch.bfloat16, autocast=autocast)
    ours = step(at_level(model, level), x, torch.bfloat16, autocast=autocast)
    assert not rule(ours, plain, oracle, eps, ("output", "buffer"))


@pytest.mark.parametrize("level", ["pointwise", "block"])
def test_the_backward_repeats_the_forwards_dtype(level):
    """Called outside autocast, the backward still computes in bfloat16: the forward's state counts."""

    dtypes = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("convolution_backward", "mm", "bmm"):
                dtypes.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    net = at_level(network(), level).float().train()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = net.features.pooled(torch.randn(SHAPE))
    with Record():
        pooled.float().square().sum().backward()
    assert dtypes == {torch.bfloat16}


def test_autocast_block_of_a_float32_map():
    """The user's own network: a float32 map enters a block under autocast, and leaves it as plain's would."""
    eps = 2**-7
    model, _ = decidable(far_from_kinks, eps)
    block = model.features.denseblock1
    x = torch.randn(4, 6, 8, 8, dtype=torch.float64)
    outputs = {}
    for level in ("none", *LEAN_LEVELS):
        block.set_recompute(level)
        with torch.autocast("cpu", torch.bfloat16):
            outputs[level] = at_copy(block)(x.float())
    assert outputs["none"].dtype == torch.float32
    block.set_recompute("none")
    oracle = {"output": at_copy(block).double()(x).detach(), "grad": torch.ones(1)}
    for level in LEAN_LEVELS:
        assert outputs[level].dtype == torch.float32
        assert not rule(
            {"output": outputs[level].detach()}, {"output": outputs["none"].detach()}, oracle, eps, ("output",)
        )


def at_copy(block):
    return copy.deepcopy(block).float().train()


@pytest.mark.parametrize("level", LEAN_LEVELS)
def test_infinite_gradients_show(level):
    """What a gradient scaler looks for: an overflow reaches the parameters, and the buffers stay plain's."""
    states = {}
    for name in ("none", level):
        net = at_level(network(), name).float().train()
        net(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))).mul(3e38).sum().backward()
        found = [p.grad for n, p in net.named_parameters() if n.startswith("features.denseblock1")]
        assert any(not g.isfinite().all() for g in found)
        states[name] = dict(net.named_buffers())
    for n, b in states["none"].items():
        torch.testing.assert_close(states[level][n], b)
