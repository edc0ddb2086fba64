"""Fake tensors' answers in a third of the time, for operators whose answer is that of their meta kernel.

`FakeTensorMode` looks every call up in a cache by all of its arguments; for an operator that makes one elementwise
result, a view or a product the lookup takes longer than the answer. A simulated step has tens of thousands of them.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten

# results and views with the shape, strides and dtype of the meta kernel, on the arguments' device
_PLAIN = frozenset(
    (
        *(aten.slice.Tensor, aten.select.int, aten.view.default, aten._unsafe_view.default, aten.as_strided.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.t.default, aten.permute.default),
        *(aten.expand.default, aten.detach.default, aten.alias.default, aten.unbind.int, aten.unfold.default),
        *(aten.clone.default, aten.flip.default, aten.sum.dim_IntList, aten.mul.out),
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    )
)
# one number from one, or from two: of arguments alike the result is another of them
_ELEMENTWISE = frozenset(
    (
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Scalar, aten.neg.default),
        *(aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.threshold_backward.default),
    )
)
_IN_PLACE = frozenset(
    (
        *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.copy_.default),
        *(aten.zero_.default, aten.relu_.default, aten.conj_physical_.default),
    )
)
# they may name a device for their result
_FACTORIES = frozenset(
    (aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default)
)
_META = torch.device("meta")


def answer(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)` on fake tensors of `mode`."""
    alike = func in _ELEMENTWISE
    in_place = func in _IN_PLACE
    factory = func in _FACTORIES
    if not (alike or in_place or factory or func in _PLAIN):
        return func(*args, **kwargs)
    first = args[0]
    if type(first) is not FakeTensor:
        return func(*args, **kwargs)
    device = first.fake_device
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, Tensor):
            if type(value) is not FakeTensor or value.fake_device != device:
                return func(*args, **kwargs)
            if in_place:
                in_place = value.shape == first.shape or value.dim() == 0
            elif alike:
                alike = value.shape == first.shape and value.dtype == first.dtype and value.stride() == first.stride()
    if in_place:
        return first
    if factory:
        asked = kwargs.get("device")
        if kwargs.get("pin_memory") or (asked is not None and torch.device(asked) != device):
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": _META}
    if alike and not kwargs and first.dtype.is_floating_point:
        func, args = aten.empty_like.default, (first,)
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return result if type(result) is FakeTensor else _fake(mode, result, device)
    return tuple(_fake(mode, part, device) for part in result)


def _fake(mode: FakeTensorMode, result: Tensor, device: torch.device) -> FakeTensor:
    """`FakeTensor(mode, result, device)`, with the attributes of an earlier one: they are the same for all results."""
    attributes = _ATTRIBUTES.get(mode, {}).get(device)
    if attributes is None:
        made = FakeTensor(mode, result, device)
        _ATTRIBUTES.setdefault(mode, {})[device] = dict(made.__dict__)
        return made
    made: Any = Tensor._make_subclass(FakeTensor, result, False, dispatch_device=True, device_for_backend_keys=device)
    made.__dict__.update(attributes)
    return made


_ATTRIBUTES: WeakKeyDictionary[FakeTensorMode, dict[torch.device, dict[str, Any]]] = WeakKeyDictionary()
