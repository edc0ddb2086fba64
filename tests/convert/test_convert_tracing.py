"""Export and trace of a converted network in eval give the original's values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from networks import monai_densenet, resnet, timm_densenet, torchvision_densenet

import lowtide


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "scope"),
    [
        (torchvision_densenet, "blocks"),
        (timm_densenet, "blocks"),
        (lambda: monai_densenet(3), "all"),
        (resnet, "all"),
    ],
    ids=["torchvision", "timm", "monai-3d", "resnet"],
)
def test_export_and_trace(make: Any, scope: Any) -> None:
    torch.manual_seed(1)
    network, x = make()
    network(x)  # running statistics that are not the initial ones
    network.eval()
    with torch.no_grad():
        expected = copy.deepcopy(network)(x)
    lowtide.convert(network, recompute="layer", scope=scope)
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(network, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-5)
    traced = torch.jit.trace(network, x)
    torch.testing.assert_close(traced(x), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(traced(x * 1.1), expected, rtol=1e-4, atol=1e-5)
