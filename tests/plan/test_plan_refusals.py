"""Bad input: one line each, before anything is done; and what planning leaves alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_networks import torchvision
from torch import nn

import lowtide
from lowtide.errors import ArgumentError, LowtideError, UnsupportedError
from lowtide.models import densenet_bc


def small() -> nn.Module:
    return densenet_bc(10, 4)


X = torch.empty(2, 3, 16, 16, device="meta")


class Counting(nn.Module):
    """Its shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[x[:, 0] > 0])


class NoCopy(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not me")


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: lowtide.plan(small(), X, "2 lots"), ArgumentError, "budget"),
        (lambda: lowtide.plan(small(), X, "-2GiB"), ArgumentError, "budget"),
        (lambda: lowtide.plan(small(), X, -5), ArgumentError, "above 0"),
        (lambda: lowtide.plan(small(), X, 0), ArgumentError, "above 0"),
        (lambda: lowtide.plan(small(), X, 1.5), ArgumentError, "budget"),  # type: ignore[arg-type]
        (lambda: lowtide.plan(small(), X, "4KiB"), ArgumentError, "parameters alone"),
        (lambda: lowtide.plan(small(), X, optimizer="sgdw"), ArgumentError, "momentum, adam, adamw"),  # type: ignore[arg-type]
        (lambda: lowtide.plan(small(), X, scope="some"), ArgumentError, "blocks, all"),  # type: ignore[arg-type]
        (lambda: lowtide.plan(small(), torch.empty(2, 5, 16, 16)), ArgumentError, "(2, 5, 16, 16)"),
        (lambda: lowtide.plan(small(), torch.empty(2, 3, 2, 2)), ArgumentError, "(2, 3, 2, 2)"),
        (lambda: lowtide.plan(small(), (X, X)), ArgumentError, "TypeError"),
        (lambda: lowtide.plan(small(), torch.empty(0, 3, 16, 16)), ArgumentError, "at least 1"),
        (lambda: lowtide.plan(small(), torch.tensor(3.0)), ArgumentError, "batch axis"),
        (lambda: lowtide.plan(small(), ()), ArgumentError, "batch axis"),
        (lambda: lowtide.plan(small().forward, X), ArgumentError, "Module"),  # type: ignore[arg-type]
        (lambda: lowtide.plan(nn.Linear(4, 4), torch.empty(2, 5)), ArgumentError, "2x5"),
        (lambda: lowtide.plan(Counting(), torch.empty(4, 4)), UnsupportedError, "depend on values"),
        (lambda: lowtide.plan(NoCopy(), X), UnsupportedError, "not me"),
        (lambda: lowtide.plan(Frozen(), X), ArgumentError, "gradient"),
        (lambda: lowtide.plan(small(), X).apply(densenet_bc(16, 4).features.denseblock1), ArgumentError, "plan.apply"),
    ],
)
def test_one_line(call: Callable[[], object], kind: type[LowtideError], words: str) -> None:
    with pytest.raises(LowtideError) as caught:
        call()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert words in message


@pytest.mark.parametrize("make", [lambda: (small(), X), lambda: torchvision(2)], ids=["lowtide", "torchvision"])
def test_planning_leaves_everything_alone(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, x = make()
    model.eval()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    classes = [(name, type(m), id(m), m.training) for name, m in model.named_modules()]
    tensors = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    plan = lowtide.plan(model, x, "8GiB", "adamw")
    assert torch.equal(torch.get_rng_state(), state)
    assert [(name, type(m), id(m), m.training) for name, m in model.named_modules()] == classes
    assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == tensors
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(p.grad is not None for p in model.parameters()) == 1
    plan.apply(model)
    assert (plan.convert_scope is not None) == (make()[0].__class__.__module__.startswith("torchvision"))


def test_applying_again_changes_the_levels_only() -> None:
    model, x = torchvision(2)
    peaks = {p.level: p.peak_bytes for p in lowtide.plan(model, x, "8GiB").at_levels}
    lowtide.plan(model, x, peaks["layer"]).apply(model)
    kinds = [type(m) for m in model.modules()]
    # planned as it now is, converted
    again = lowtide.plan(model, x, peaks["none"])
    assert again.convert_scope is None
    assert {p.level: p.peak_bytes for p in again.at_levels} == peaks
    again.apply(model)
    assert [type(m) for m in model.modules()] == kinds
    model.set_recompute("none")  # type: ignore[operator]
    lowtide.restore(model)


SCRIPT = """
import re
import torch, torchvision, lowtide
from pathlib import Path
def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
model = torchvision.models.densenet201()
lowtide.plan(torchvision.models.densenet.DenseNet(4, (2, 2), 8), torch.empty(2, 3, 32, 32, device="meta"))
Path("/proc/self/clear_refs").write_text("5")
base = status("VmRSS")
plan = lowtide.plan(model, torch.empty(32, 3, 224, 224, device="meta"), "4GiB", "adamw")
growth = status("VmHWM") - base
assert plan.at_levels[0].peak_bytes > 5 * 2**30, plan
torch.ones(2**26)
assert status("VmHWM") - base > 2**28, "the high-water sees a real map"
print(growth)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_planning_densenet201_takes_less_than_200_mib() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 200 * 2**20
