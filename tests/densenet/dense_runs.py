"""Shared by the DenseNet tests: run a network for some steps, keep everything that can be seen, compare two runs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowtide.models import DenseNet

LEAN_LEVELS = ("pointwise", "layer", "block")


def network(seed: int = 0, **keywords) -> DenseNet:
    """A float64 DenseNet whose batch norms have random gamma and beta and moved running statistics."""
    torch.manual_seed(seed)
    settings = {"growth_rate": 4, "block_config": (3, 2), "num_init_features": 6}
    return randomise(DenseNet(**(settings | keywords)).double())


def randomise(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
            if module.running_mean is not None:
                nn.init.normal_(module.running_mean, 0, 0.1)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def at_level(model: nn.Module, level: str) -> nn.Module:
    """A copy of the model at another memory level."""
    model = copy.deepcopy(model)
    model.set_recompute(level)
    return model


def projection(y: Tensor, seed: int) -> Tensor:
    """The loss: a fixed random projection of the output."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (y * weights.to(y.dtype)).sum()


def run(
    model: nn.Module, x: Tensor, steps: int = 1, *, image_grad: bool = True, train: bool = True
) -> dict[str, Tensor]:
    """Train `steps` steps with SGD; every output, gradient, buffer, the generator's state and the eval output after."""
    model.train(train)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        image = x.detach().clone().requires_grad_(image_grad)
        y = model(image)
        optimizer.zero_grad()
        projection(y, step).backward()
        seen[f"output {step}"] = y.detach().clone()
        if image_grad:
            seen[f"grad {step} image"] = image.grad
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                seen[f"grad {step} {name}"] = parameter.grad.clone()
            else:
                assert parameter.grad is None, f"{name} is frozen and has a gradient"
        optimizer.step()
        for name, buffer in model.named_buffers():
            seen[f"buffer {step} {name}"] = buffer.clone()
    seen["random state"] = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        seen["eval output"] = model(x)
    return seen


def errors(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor, by its own norm; by the largest gradient where the true gradient is zero."""
    assert list(ours) == list(oracle)
    largest = max((v.norm().item() for k, v in oracle.items() if k.startswith("grad")), default=1.0)
    found = {}
    for name, expected in oracle.items():
        got = ours[name]
        assert got.shape == expected.shape, name
        if not expected.is_floating_point():
            found[name] = 0.0 if torch.equal(got, expected) else float("inf")
            continue
        scale = expected.double().norm().item()
        if name.startswith("grad") and scale < 1e-10 * largest:
            scale = largest
        error = (got.double() - expected.double()).norm().item()
        found[name] = error / scale if scale else (0.0 if error == 0 else float("inf"))
        if not torch.isfinite(got).all():
            found[name] = float("inf")
    return found


def assert_same(ours: dict[str, Tensor], oracle: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    for wrong in ("zero", "negated", "scaled"):
        assert max(errors(spoiled(oracle, wrong), oracle).values()) > tolerance, f"the check passes a {wrong} answer"
    bad = {name: error for name, error in errors(ours, oracle).items() if not error <= tolerance}
    assert not bad, f"{len(bad)} of {len(oracle)} differ: " + ", ".join(
        f"{k}: {v:.1e}" for k, v in list(bad.items())[:8]
    )


def spoiled(seen: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """The same run with each gradient zero, negated or 1 % too large."""
    factor = {"zero": 0.0, "negated": -1.0, "scaled": 1.01}[how]
    return {name: value * factor if name.startswith("grad") else value for name, value in seen.items()}
