"""From modules to `lowtide.parts`, and when that is allowed: a hooked or replaced child must be called itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lowtide import parts
from lowtide.nn.batch_norm import BATCH_NORMS, as_parts

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class NotLean(Exception):
    """Why a module has to run the plain way; never leaves this package."""


def must_trace() -> bool:
    """Whether somebody is recording operations (compile, export, jit trace, functorch): they need the plain ones."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def is_hooked(module: nn.Module) -> bool:
    """Whether calling `module` does more than its forward, other than gathering sharded parameters."""
    gathering = module.__dict__.get("gathering_hooks", frozenset())
    return bool(
        module._forward_hooks.keys() - gathering
        or module._forward_pre_hooks.keys() - gathering
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def check_unhooked(module: nn.Module, name: str) -> None:
    if is_hooked(module):
        raise NotLean(f"{name} has a hook or its own forward")


def check_no_global_hooks() -> None:
    if torch_module._has_any_global_hook():
        raise NotLean("a global module hook is set")


def describe_norm(module: nn.Module, name: str) -> parts.BatchNorm:
    if type(module) not in BATCH_NORMS:
        raise NotLean(f"{name} is a {type(module).__name__}, not a batch norm")
    check_unhooked(module, name)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return as_parts(module)


def describe_convolution(
    module: nn.Module, name: str, size: int, *, stride: int = 1, padding: int | None = None
) -> parts.Convolution:
    """A square convolution with zero padding of half the kernel (or `padding`) and nothing unusual."""
    if type(module) not in CONVOLUTIONS:
        raise NotLean(f"{name} is a {type(module).__name__}, not a convolution")
    check_unhooked(module, name)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    pad = size // 2 if padding is None else padding
    expected = ((size,), (stride,), (pad,), (1,), 1, "zeros")
    found = (
        *(
            tuple(sorted(set(v)))
            for v in (module.kernel_size, module.stride, _numbers(module.padding), module.dilation)
        ),
        module.groups,
        module.padding_mode,
    )
    if found != expected:
        raise NotLean(f"{name} is not a {size}x convolution with stride {stride} and padding {pad}")
    return parts.Convolution(module.weight, module.bias)


def _numbers(padding: Any) -> tuple[int, ...]:
    return (-1,) if isinstance(padding, str) else tuple(padding)


def check_relu(module: nn.Module, name: str) -> None:
    if type(module) is not nn.ReLU:
        raise NotLean(f"{name} is a {type(module).__name__}, not a ReLU")
    check_unhooked(module, name)
