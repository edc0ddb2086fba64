"""The dtype in which autocast would run a step, found by running it on one number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.lean.remade import activation
from lowtide.parts import BatchNorm
from lowtide.steps import Activation, Conv, GroupNorm, InstanceNorm


def autocast_dtype(step: Any, x: Tensor, weight_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which autocast would run `step` on x; None where autocast is off."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return None
    kind = step if isinstance(step, type) else (Conv if isinstance(step, Conv) else step.function)
    return _autocast_rule(kind, device, torch.get_autocast_dtype(device), x.dtype, weight_dtype or torch.float32)


@functools.cache
def _autocast_rule(
    kind: Any, device: str, _autocast: torch.dtype, dtype: torch.dtype, weight_dtype: torch.dtype
) -> torch.dtype:
    """The rules differ between devices and releases."""
    x = torch.ones(1, 1, 2, dtype=dtype, device=device)
    w = torch.ones(1, dtype=weight_dtype, device=device)
    runs: dict[Any, Callable[[], Tensor]] = {
        BatchNorm: lambda: F.batch_norm(x, w.clone(), w.clone(), w, w, False),
        InstanceNorm: lambda: F.instance_norm(x, None, None, w, w),
        GroupNorm: lambda: F.group_norm(x, 1, w, w),
        Conv: lambda: F.conv1d(x, w.view(1, 1, 1)),
        "prelu": lambda: F.prelu(x, w),
    }
    with torch.no_grad():
        return runs.get(kind, lambda: activation(x, Activation(kind)))().dtype
