"""What runs again in backward, and the floating-point operations of forward and backward.

An operator of the backward is counted as "ran again" when an operator of the forward had the same name, the same
shapes of arguments AND the same bytes of output: that is a recomputation whatever tool made it (torch's checkpoint,
a custom function). An ordinary gradient kernel never matches: its output depends on the incoming gradient. A
recomputation in other tiles than the forward's does not match either; `Operators.against` compares with the plain
form and shows it in the FLOPs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lowtide.measure.call import tensors_in
from lowtide.measure.units import format_count

aten = torch.ops.aten
# operators whose output says nothing: views have no arithmetic, fresh memory has no meaning yet
_NO_ARITHMETIC = {
    aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.new_zeros, aten.new_ones, aten.new_full, aten.fill_, aten.zero_, aten.detach, aten.lift_fresh,
}  # fmt: skip


@dataclass(frozen=True)
class Repeated:
    """An operator that ran again in backward."""

    name: str
    count: int
    flops: int


@dataclass(frozen=True)
class Operators:
    """Counts of one forward and backward. FLOPs are those of matrix products, convolutions, attention and FFTs."""

    forward_count: int
    backward_count: int
    forward_flops: int
    backward_flops: int
    repeated: tuple[Repeated, ...]  # most FLOPs first, then most calls

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def repeated_count(self) -> int:
        return sum(r.count for r in self.repeated)

    @property
    def repeated_flops(self) -> int:
        return sum(r.flops for r in self.repeated)

    def against(self, plain: Operators) -> float:
        """FLOPs of this step over those of the plain form's step; 1.0 means that nothing was redone.

        A plain form without counted FLOPs gives 1.0 if this has none either, else infinity.
        """
        if plain.flops == 0:
            return 1.0 if self.flops == 0 else math.inf
        return self.flops / plain.flops

    def __str__(self) -> str:
        lines = [
            f"FLOPs: forward {format_count(self.forward_flops)}, backward {format_count(self.backward_flops)}",
            f"ran again in backward: {self.repeated_count} operators, {format_count(self.repeated_flops)} FLOPs",
        ]
        lines += [f"  {r.count:>6} x {r.name}  {format_count(r.flops)}" for r in self.repeated[:10]]
        return "\n".join(lines)


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run while it is active, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._counts = {False: 0, True: 0}  # in backward? -> operators
        self._flops = {False: 0, True: 0}
        self._repeated: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_in((args, kwargs)))
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if shapes and not func.is_view and packet not in _NO_ARITHMETIC:
            in_backward = torch._C._current_graph_task_id() != -1
            formula = _FFT_FLOPS.get(packet) or flop_registry.get(packet)
            flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
            self._add(packet, shapes, tensors_in(result), flops, in_backward)
        return result

    def _add(self, packet: Any, shapes: Any, outputs: list[Tensor], flops: int, in_backward: bool) -> None:
        self._counts[in_backward] += 1
        self._flops[in_backward] += flops
        key = (packet, shapes, tuple(_fingerprint(t) for t in outputs))
        if not in_backward:
            self._seen[key] += 1
        elif self._seen[key] > 0:
            self._seen[key] -= 1
            entry = self._repeated.setdefault(str(packet), [0, 0])
            entry[0] += 1
            entry[1] += flops

    def result(self) -> Operators:
        repeated = [Repeated(name, count, flops) for name, (count, flops) in self._repeated.items()]
        repeated.sort(key=lambda r: (-r.flops, -r.count, r.name))
        return Operators(
            self._counts[False], self._counts[True], self._flops[False], self._flops[True], tuple(repeated)
        )


def _fingerprint(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    data = flat.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hash(data.tobytes())


def _fft(length: int, batch: float, *, real: bool) -> float:
    # 5 N log2 N for a complex transform (the count of the split-radix literature and of FFTW's benchmark), half for
    # a real one
    return batch * (2.5 if real else 5.0) * length * math.log2(max(length, 2))


def _fft_r2c(x: Tensor, dim: list[int], *_: Any, out_val: Tensor, **__: Any) -> float:
    length = math.prod(x.shape[d] for d in dim)
    return _fft(length, x.numel() / length, real=True)


def _fft_c2r(x: Tensor, dim: list[int], *_: Any, out_val: Tensor, **__: Any) -> float:
    length = math.prod(out_val.shape[d] for d in dim)
    return _fft(length, out_val.numel() / length, real=True)


def _fft_c2c(x: Tensor, dim: list[int], *_: Any, out_val: Tensor, **__: Any) -> float:
    length = math.prod(x.shape[d] for d in dim)
    return _fft(length, x.numel() / length, real=False)


_FFT_FLOPS: dict[Any, Callable[..., float]] = {
    aten._fft_r2c: _fft_r2c,
    aten._fft_c2r: _fft_c2r,
    aten._fft_c2c: _fft_c2c,
}
