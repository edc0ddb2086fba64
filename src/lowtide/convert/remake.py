"""Norm, activation, convolution, max pool and concatenation of any network, in their lean form, call by call.

While a converted module runs, a torch function mode sees every call of these functions, whether a module or the
network's own code makes it. A norm keeps its input; what is made from it in the next steps is made again in backward
(`lowtide.lean.norm_act_conv`). No module and no value changes: a call that the lean form does not cover runs as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowtide.norm_act_conv_functions import (
    activate,
    can_be_made_again,
    can_be_spared,
    concatenate,
    convolve,
    max_pool,
    normalise,
    note_kept,
)
from lowtide.parts import BatchNorm
from lowtide.steps import Activation, Conv, GroupNorm, InstanceNorm, MaxPool, Norm

_local = threading.local()


class Remaking(TorchFunctionMode):
    """Inside it the functions of `HANDLERS` run in their lean form, wherever a gradient is to come."""

    def __enter__(self) -> Remaking:
        self.outer = getattr(_local, "mode", None)
        self.hooks = _saved_tensor_hooks()
        _local.mode = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _local.mode = self.outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        # under hooks that came later (a checkpoint inside the network) a second run of the same calls must keep
        # the same tensors, and it may not come through here
        if handler is not None and torch.is_grad_enabled() and self.hooks is _saved_tensor_hooks():
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def is_remaking() -> bool:
    """Whether a mode is on that would handle a call made now."""
    mode = getattr(_local, "mode", None)
    return mode is not None and mode.hooks is _saved_tensor_hooks()


def _saved_tensor_hooks() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks[0] if hooks else None


def _fits(x: Any) -> bool:
    """Whether x is a map of an ordinary kind."""
    return type(x) in (Tensor, nn.Parameter, FakeTensor) and x.dim() in (3, 4, 5) and x.is_floating_point()


def _trains(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _normalise(x: Tensor, norm: Norm) -> Any:
    if not _fits(x) or not _trains(x, norm.weight, norm.bias):
        return NotImplemented
    return normalise(x, norm)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return NotImplemented
    return _normalise(
        input, BatchNorm(weight, bias, running_mean, running_var, eps=eps, momentum=momentum, training=training)
    )


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if (running_mean is None) != (running_var is None) or (running_mean is None and not use_input_stats):
        return NotImplemented
    return _normalise(input, InstanceNorm(weight, bias, running_mean, running_var, eps, momentum, use_input_stats))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    return _normalise(input, GroupNorm(num_groups, weight, bias, eps))


def _activate(x: Tensor, act: Activation) -> Any:
    if not _fits(x) or not x.requires_grad:
        return NotImplemented
    # relu keeps its output, which what follows keeps as well: nothing is won unless a norm's input is kept instead
    alone = not can_be_made_again(x)
    if alone and (act.inplace or act.function == "relu"):
        return NotImplemented
    return activate(x, act)


def _relu(input: Tensor, inplace: bool = False) -> Any:
    return _activate(input, Activation("relu", inplace=inplace))


def _relu_(input: Tensor) -> Any:
    return _activate(input, Activation("relu", inplace=True))


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    if (min_val, max_val) != (0.0, 6.0):
        return NotImplemented
    return _relu6(input, inplace)


def _relu6(input: Tensor, inplace: bool = False) -> Any:
    return _activate(input, Activation("relu6", inplace=inplace))


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return _activate(input, Activation("leaky_relu", negative_slope, inplace=inplace))


def _prelu(input: Tensor, weight: Tensor) -> Any:
    return _activate(input, Activation("prelu", weight=weight))


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Any:
    return _activate(input, Activation("elu", alpha, inplace=inplace))


def _silu(input: Tensor, inplace: bool = False) -> Any:
    return _activate(input, Activation("silu", inplace=inplace))


def _gelu(input: Tensor, approximate: str = "none") -> Any:
    return _activate(input, Activation("gelu", tanh=approximate == "tanh"))


def _hardswish(input: Tensor, inplace: bool = False) -> Any:
    return _activate(input, Activation("hardswish", inplace=inplace))


def _mish(input: Tensor, inplace: bool = False) -> Any:
    return _activate(input, Activation("mish", inplace=inplace))


def _can_skip(x: Any, dims: int) -> bool:
    """Whether x, of `dims` spatial axes and with a batch axis, need not be kept."""
    return _fits(x) and x.dim() == dims + 2 and x.requires_grad and can_be_made_again(x)


def _note_kept(x: Any, weight: Tensor) -> None:
    """A convolution whose weight trains keeps the very tensor that it reads, unless autocast copies it."""
    if _fits(x) and weight.requires_grad and not torch.is_autocast_enabled(x.device.type):
        note_kept(x)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    return values * dims if len(values) == 1 else values


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dims = weight.dim() - 2
    if not _can_skip(input, dims):
        _note_kept(input, weight)
        return NotImplemented
    dilations = _each(dilation, dims)
    if padding == "same":
        around = [d * (size - 1) for d, size in zip(dilations, weight.shape[2:], strict=True)]
        if any(total % 2 for total in around):
            return NotImplemented
        padding = [total // 2 for total in around]
    elif padding == "valid":
        padding = 0
    return convolve(
        input, Conv(weight, bias, _each(stride, dims), _each(padding, dims), dilations, False, (0,) * dims, groups)
    )


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    dims = weight.dim() - 2
    if not _can_skip(input, dims):
        _note_kept(input, weight)
        return NotImplemented
    numbers = (_each(stride, dims), _each(padding, dims), _each(dilation, dims))
    return convolve(input, Conv(weight, bias, *numbers, True, _each(output_padding, dims), groups))


def _max_pool(dims: int) -> Callable[..., Any]:
    def handler(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices or not _can_skip(input, dims):
            return NotImplemented
        stride = kernel_size if stride is None or stride == [] else stride
        kernel, stride, padding, dilation = (_each(v, dims) for v in (kernel_size, stride, padding, dilation))
        return max_pool(input, MaxPool(kernel, stride, padding, dilation, ceil_mode))

    return handler


def _cat(tensors: Any, dim: int = 0, *, out: Tensor | None = None) -> Any:
    maps = list(tensors)
    if out is not None or len(maps) < 2 or not all(map(_fits, maps)) or not any(map(can_be_spared, maps)):
        return NotImplemented
    return concatenate(maps) if dim in (1, 1 - maps[0].dim()) else NotImplemented


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.relu_: _relu_,
    Tensor.relu_: _relu_,
    F.relu6: _relu6,
    F.hardtanh: _hardtanh,
    F.leaky_relu: _leaky_relu,
    torch.prelu: _prelu,
    Tensor.prelu: _prelu,
    F.elu: _elu,
    F.silu: _silu,
    F.gelu: _gelu,
    F.hardswish: _hardswish,
    F.mish: _mish,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.conv3d: _convolution,
    torch.conv_transpose1d: _transposed,
    torch.conv_transpose2d: _transposed,
    torch.conv_transpose3d: _transposed,
    F.max_pool1d: _max_pool(1),
    F.max_pool2d: _max_pool(2),
    F.max_pool3d: _max_pool(3),
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
}
