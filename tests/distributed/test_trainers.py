"""The examples: lowtide's modules inside Lightning's Trainer and Hugging Face Accelerate equal a plain loop."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lowtide.models import DenseNet, SequenceModel

EXAMPLES = Path(__file__).parents[2] / "examples"
# what these packages do to others, not to us
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def fit_of(example: str):
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fit


def network(kind: str, level: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "dense":
        return DenseNet(3, (2, 2), num_init_features=4, num_classes=3, recompute=level).double()
    return SequenceModel(2, 3, 4, 2, 16, kernel_dim=4, recompute=level).double()


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (20, 3, 8, 8) if kind == "dense" else (20, 16, 2)
    return torch.randn(shape, dtype=torch.float64, generator=draw), torch.randint(3, (20,), generator=draw)


def plain_loop(model: torch.nn.Module, images: torch.Tensor, classes: torch.Tensor) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for at in range(0, 20, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at : at + 8]), classes[at : at + 8]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["dense", "sequence"])
@pytest.mark.parametrize("example", ["lightning_trainer", "accelerate_loop"])
def test_a_trainer_of_others_trains_the_same(example: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    untrained = network(kind, "none").state_dict()
    expected = plain_loop(network(kind, "none"), *data(kind)).state_dict()
    fit = fit_of(example)
    for level in ("pointwise", "layer", "block"):
        found = fit(network(kind, level), *data(kind)).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = float((found[name].double() - value.double()).norm())
            assert error <= 1e-9 * max(1.0, float(value.double().norm())), (level, name)
    moved = [name for name, value in expected.items() if not torch.equal(value, untrained[name])]
    assert len(moved) > len(expected) / 2


def test_accelerate_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "accelerate_loop.py")], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
