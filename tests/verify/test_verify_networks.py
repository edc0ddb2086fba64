"""Networks from outside: the memory-efficient densenets update their statistics twice; the plain ones pass."""

from __future__ import annotations

import pytest
import torch

import lowtide

X = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_memory_efficient_densenet121_has_174_wrong_buffers(package: str) -> None:
    from lowtide.models.pairs import resolve_pair

    torch.manual_seed(0)
    plain, lean, _ = resolve_pair(f"{package}:densenet121")
    report = lowtide.verify(plain, lean, X, steps=1)
    buffers = [f for f in report.failures if f.kind == "buffer"]
    # norm1 of each of the 58 dense layers lies inside the checkpoint: mean, variance, counter
    assert len(buffers) == 3 * 58
    assert {f.kind for f in report.failures} == {"buffer", "eval_output"}
    assert report.failures[0].name == "features.denseblock1.denselayer1.norm1.running_mean"
    assert report.first_module == "features.denseblock1.denselayer1.norm1"
    assert len(list(plain.buffers())) == 363


def test_plain_densenet121_passes_against_itself() -> None:
    from torchvision.models import densenet121

    torch.manual_seed(0)
    report = lowtide.verify(densenet121(), densenet121(), X, steps=1)
    assert report.ok, str(report)
    assert {r.dtype for r in report.rows} == {"float64", "float32"}
