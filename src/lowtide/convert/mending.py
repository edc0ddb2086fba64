"""In-place activations on what a backward hook watches: autograd refuses them, so they run out of place.

A full backward hook on a module passes its inputs and outputs through a function whose outputs must not be changed.
Networks that apply `relu(inplace=True)` to a module's output (torchvision's DenseNet does) cannot be hooked there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_WITH_FLAG = (F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.silu, F.hardswish, F.mish, F.dropout)
_IN_PLACE = (torch.relu_, Tensor.relu_)


class Mending(TorchFunctionMode):
    """Inside it those calls give what they would give out of place; every other call is untouched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and _is_watched(args[0]):
            if func in _IN_PLACE:
                func = torch.relu
            elif func in _WITH_FLAG and kwargs.get("inplace"):
                kwargs["inplace"] = False
            elif func is F.relu and len(args) == 2:
                args = args[:1]
        return func(*args, **kwargs)


def _is_watched(x: Any) -> bool:
    """Whether x came through a module's full backward hook."""
    return isinstance(x, Tensor) and x.grad_fn is not None and x.grad_fn.name() == "BackwardHookFunctionBackward"


def has_backward_hook(model: nn.Module) -> bool:
    return any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
