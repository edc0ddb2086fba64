"""A chain x = cat([f(x), x]) with any f: values, gradients, buffers, random numbers, and one buffer of features."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.lean import replay
from lowtide.nn import DenselyConnected

C0, K, COUNT = 6, 4, 3


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


def layer(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.SiLU(),
        nn.Conv2d(channels, K, 3, padding=1),
        SqueezeExcitation(K),
        nn.Dropout(0.2),
    )


class Plain(nn.Module):
    """The chain as people write it."""

    def __init__(self, *, new_first: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, C0, 3, padding=1)
        self.layers = nn.ModuleList(layer(C0 + i * K) for i in range(COUNT))
        self.out = nn.Conv2d(C0 + COUNT * K, 2, 1)
        self.new_first = new_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for f in self.layers:
            x = torch.cat([f(x), x] if self.new_first else [x, f(x)], 1)
        return self.out(x)


class Wrapped(Plain):
    """The same by wrapping: the keys stay."""

    def __init__(self, *, new_first: bool = True, **options: Any) -> None:
        super().__init__(new_first=new_first)
        self.layers = DenselyConnected(self.layers, new_first=new_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.first(x)))


def pair(**options: Any) -> tuple[Plain, Wrapped]:
    torch.manual_seed(1)
    plain = Plain(new_first=options.get("new_first", True))
    wrapped = Wrapped(**options)
    wrapped.load_state_dict(plain.state_dict())
    return plain, wrapped


def image() -> Tensor:
    return torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("level", ["none", "pointwise", "layer", "block"])
@pytest.mark.parametrize("new_first", [True, False])
def test_parity(level: Any, new_first: bool) -> None:
    lowtide.verify(*pair(new_first=new_first, recompute=level), image()).raise_if_failed()


@pytest.mark.parametrize("level", ["layer", "block"])
def test_parity_under_autocast_and_channels_last(level: Any) -> None:
    plain, wrapped = pair(recompute=level)
    lowtide.verify(plain, wrapped, image(), autocast=torch.bfloat16).raise_if_failed()
    x = image().contiguous(memory_format=torch.channels_last)
    lowtide.verify(plain, wrapped, x, steps=1).raise_if_failed()
    assert wrapped.layers(wrapped.first(x)).is_contiguous(memory_format=torch.channels_last)


def no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.torch, "set_rng_state", lambda state: None)


def moving_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.func.functional_call
    monkeypatch.setattr(
        replay.torch.func,
        "functional_call",
        lambda module, tensors, args: original(
            module, {k: v for k, v in tensors.items() if "running" not in k and "tracked" not in k}, args
        ),
    )


@pytest.mark.parametrize("plant", [no_random_state, moving_buffers])
def test_planted_faults_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not lowtide.verify(*pair(recompute="layer"), image()).ok


@pytest.mark.parametrize(("level", "channels"), [("layer", C0 + COUNT * K), ("block", C0)])
def test_kept_bytes(level: Any, channels: int) -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.BatchNorm2d(C0 + i * K), nn.ReLU(), nn.Conv2d(C0 + i * K, K, 1)) for i in range(COUNT)
    )
    chain = DenselyConnected(layers, recompute=level)
    x = torch.randn(2, C0, 6, 5).requires_grad_()
    for _ in range(2):  # the widths are learnt in the first call
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chain(x)
        parameters = {p.untyped_storage().data_ptr() for p in chain.parameters()}
        assert sum(size for key, size in kept.items() if key not in parameters) == channels * x.numel() // C0 * 4


class Counting(nn.Module):
    """Its output depends on a buffer that each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C0, K, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(x) * self.calls.clone()


def test_a_buffer_that_the_output_depends_on_is_replayed_from_its_old_value() -> None:
    x = torch.randn(2, C0, 4, 4, dtype=torch.float64)
    results = []
    for level in ("none", "layer", "block"):
        torch.manual_seed(0)
        chain = DenselyConnected([Counting()], recompute=level).double()
        leaf = x.clone().requires_grad_()
        out = chain(leaf)
        out = chain(leaf) + out
        out.square().sum().backward()
        results.append((leaf.grad, chain[0].conv.weight.grad, chain[0].calls.clone()))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-12, atol=1e-12)
    assert results[0][2] == 2


def test_spectral_norm_and_training_flags_changed_before_the_backward() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        conv = parametrizations.spectral_norm(nn.Conv2d(C0, K, 3, padding=1))
        return nn.Sequential(nn.BatchNorm2d(C0), conv).double()

    x = torch.randn(2, C0, 4, 4, dtype=torch.float64)
    results = []
    for level in ("none", "layer"):
        chain = DenselyConnected([build()], recompute=level)
        out = chain(x).square().sum()
        chain.eval()
        out.backward()
        results.append([p.grad for p in chain.parameters()] + [b.clone() for b in chain.buffers()])
        assert not chain[0].training
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


def test_a_parameter_shared_by_two_layers_gets_both_gradients() -> None:
    x = torch.randn(2, C0, 4, 4, dtype=torch.float64)
    results = []
    for level in ("none", "layer", "block"):
        torch.manual_seed(0)
        shared = nn.Conv2d(1, K, 3, padding=1)

        class Mean(nn.Module):
            def __init__(self, conv: nn.Module) -> None:
                super().__init__()
                self.conv = conv

            def forward(self, x: Tensor) -> Tensor:
                return self.conv(x.mean(1, keepdim=True))

        chain = DenselyConnected([Mean(shared), Mean(shared)], recompute=level).double()
        chain(x).square().sum().backward()
        results.append(shared.weight.grad)
    assert all(torch.allclose(r, results[0], rtol=1e-12) for r in results[1:])


@pytest.mark.parametrize("level", ["layer", "block"])
def test_inside_a_checkpoint_and_with_kept_tensors_moved_away(level: Any) -> None:
    x = torch.randn(2, C0, 4, 4, dtype=torch.float64)
    results = []
    for around in ("nothing", "checkpoint", "offloading"):
        torch.manual_seed(0)
        chain = DenselyConnected([layer(C0), layer(C0 + K)], recompute=level).double()
        if around == "checkpoint":
            out = checkpoint(chain, x, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu() if around == "offloading" else contextlib.nullcontext():
                out = chain(x)
        out.square().sum().backward()
        results.append([p.grad for p in chain.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[2], results[0], rtol=1e-12, atol=1e-12)


def test_a_data_parallel_replica_trains_its_own_parameters() -> None:
    _, wrapped = pair(recompute="layer")
    chain = wrapped.layers.double()
    weight = {name: p.detach().clone().requires_grad_() for name, p in chain.named_parameters()}
    replicas = {name: module._replicate_for_data_parallel() for name, module in chain.named_modules()}
    for name, replica in replicas.items():
        for child in replica._modules:
            replica._modules[child] = replicas[f"{name}.{child}" if name else child]
        replica._former_parameters = {}
        for key in chain.get_submodule(name)._parameters:
            # not a leaf, as after a broadcast
            copied = weight[f"{name}.{key}" if name else key] * 1
            setattr(replica, key, copied)
            replica._former_parameters[key] = copied
    x = torch.randn(2, C0, 4, 4, dtype=torch.float64)
    torch.manual_seed(2)
    replicas[""](x).square().sum().backward()
    torch.manual_seed(2)
    chain(x).square().sum().backward()
    for name, parameter in chain.named_parameters():
        torch.testing.assert_close(weight[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)


def test_copies_and_no_gradient() -> None:
    _, wrapped = pair(recompute="layer")
    twin = copy.deepcopy(wrapped).eval()
    with torch.no_grad():
        out = twin(image())
    assert out.grad_fn is None
    assert torch.equal(out, wrapped.eval()(image()))


def test_a_hooked_layer_is_seen_with_its_gradient() -> None:
    plain, wrapped = pair(recompute="layer")
    seen: list[list[Tensor]] = []
    for network in (plain, wrapped):
        tensors: list[Tensor] = []
        network.double().eval().layers[1].register_forward_hook(lambda m, args, out, kept=tensors: kept.append(out))
        if network is wrapped:
            with pytest.warns(UserWarning, match="DenselyConnected runs in ordinary autograd.*: layer 1 has a hook"):
                out = network(image().double())
        else:
            out = network(image().double())
        (found,) = torch.autograd.grad(out.square().sum(), tensors)
        seen.append([*tensors, found])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-12, atol=1e-12)


def chain_of(f: nn.Module) -> DenselyConnected:
    return DenselyConnected([f], recompute="layer")


class Foreign(nn.Module):
    def __init__(self, outside: Tensor) -> None:
        super().__init__()
        self.conv, self.outside = nn.Conv2d(C0, K, 1), [outside]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.outside[0]


def test_refusals() -> None:
    x = torch.randn(2, C0, 4, 4).requires_grad_()
    with pytest.raises(ArgumentError, match="at least one layer"):
        DenselyConnected([])
    with pytest.raises(ArgumentError, match="layers that are modules, got function"):
        DenselyConnected([lambda x: x])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="recompute to be one of"):
        DenselyConnected([nn.Identity()], recompute="most")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"layer 0 to return new channels of the size of its map \(2, 6, 4, 4\)"):
        chain_of(nn.MaxPool2d(2))(x)
    with pytest.raises(UnsupportedError, match="Sequential, which changes it in place"):
        chain_of(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(C0, K, 1)))(x * 1)
    with pytest.raises(UnsupportedError, match="a foreign tensor of shape"):
        chain_of(Foreign(torch.ones(1, requires_grad=True)))(x).sum().backward()
    with pytest.raises(UnsupportedError, match='double backward needs recompute="none"'):
        torch.autograd.grad(chain_of(nn.Conv2d(C0, K, 1))(x).sum(), x, create_graph=True)
