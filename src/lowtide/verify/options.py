"""The arguments of `verify`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.verify.run import Cotangents, Loss, Phase, Setting
from lowtide.verify.subject import KeyMap
from lowtide.verify.trees import Inputs, cast, is_inexact, map_tensors

Part = Literal["no_grad_forward", "eval", "hooks"]
PARTS: tuple[Part, ...] = get_args(Part)
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Precision:
    """A dtype to verify in besides float64; `asked` by the caller, or tried by default."""

    dtype: torch.dtype
    autocast: torch.dtype | None
    asked: bool

    @property
    def eps(self) -> float:
        """The rounding unit that the rule uses."""
        return torch.finfo(self.autocast or self.dtype).eps


@dataclass(frozen=True)
class Options:
    """What to run. See `lowtide.verify` for the meaning of each."""

    inputs: Inputs
    device: torch.device
    precisions: tuple[Precision, ...]
    steps: int
    loss: Loss | None
    target: object
    optimizer: MakeOptimizer | None
    forwards: int
    accumulate: int
    backward_twice: bool
    frozen: tuple[str, ...]
    key_map: KeyMap | None
    without: frozenset[Part]
    seed: int

    def setting(self, dtype: torch.dtype, autocast: torch.dtype | None = None, inputs: Inputs | None = None) -> Setting:
        """What both modules are given in `dtype`; `inputs` instead of the caller's where they were rounded before."""
        return Setting(
            inputs=self.cast_inputs(dtype) if inputs is None else inputs,
            dtype=dtype,
            device=self.device,
            seed=self.seed,
            cotangents=Cotangents(self.seed),
            autocast=autocast,
            loss=self.loss,
            target=map_tensors(self.target, lambda t: cast(t.detach().to(self.device), dtype)),
            forwards=self.forwards,
            accumulate=self.accumulate,
            backward_twice=self.backward_twice,
        )

    def cast_inputs(self, dtype: torch.dtype) -> Inputs:
        """The caller's inputs on the device, floating-point ones in `dtype`."""
        return self.inputs.map(lambda t: cast(t.detach().to(self.device), dtype))

    def phases(self, always_input_grad: bool) -> list[Phase]:
        """The float64 run. Every other step leaves the inputs without a gradient, as images have none in training."""
        phases = []
        for step in range(1, self.steps + 1):
            input_grad = always_input_grad or step % 2 == 1
            phases.append(Phase(f"step {step}", len(phases), backward=True, input_grad=input_grad, update=True))
        # after the steps: the first of them is to start from weights and buffers that float32 holds exactly
        if "no_grad_forward" not in self.without:
            phases.append(Phase("no_grad train forward", len(phases), grad=False))
        if "eval" not in self.without:
            number = len(phases)
            phases.append(Phase("eval with gradients", number, train=False, backward=True, input_grad=True, few=True))
            phases.append(Phase("eval", len(phases), train=False, grad=False))
        return phases


def check_options(
    reference: object,
    inputs: object,
    *,
    steps: int,
    loss: Loss | None,
    target: object,
    optimizer: object,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    autocast: torch.dtype | bool | None,
    forwards: int,
    accumulate: int,
    backward_twice: bool,
    frozen: Iterable[str],
    key_map: KeyMap | None,
    without: Iterable[str],
    seed: int,
) -> Options:
    """Raises `ArgumentError` for a value outside its range."""
    where = "verify"
    for name, value in (("steps", steps), ("forwards", forwards), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(describe(expected=f"{name} to be an integer >= 1", got=repr(value), where=where))
    if target is not None and loss is None:
        raise ArgumentError(describe(expected="loss together with target", got="target alone", where=where))
    left_out: frozenset[Part] = frozenset(part for part in PARTS if part in set(without))
    unknown = set(without) - left_out
    if unknown:
        expected = f"without to be among {', '.join(PARTS)}"
        raise ArgumentError(describe(expected=expected, got=repr(min(unknown)), where=where))
    if isinstance(frozen, str):
        raise ArgumentError(describe(expected="a list of names", got=repr(frozen), where="verify(frozen)"))
    given = Inputs.of(inputs)
    chosen = _device(reference, given, device)
    return Options(
        inputs=given.map(lambda t: t.detach().clone()),
        device=chosen,
        precisions=_precisions(reference, dtype, autocast),
        steps=steps,
        loss=loss,
        target=target,
        optimizer=None if optimizer is None else _optimizer(optimizer),
        forwards=forwards,
        accumulate=accumulate,
        backward_twice=backward_twice,
        frozen=tuple(frozen),
        key_map=key_map,
        without=left_out,
        seed=seed,
    )


def _device(reference: object, inputs: Inputs, device: torch.device | str | None) -> torch.device:
    """Where the caller says, else where the reference's weights are, else where the inputs are."""
    if device is not None:
        return torch.device(device)
    owner = reference if isinstance(reference, nn.Module) else getattr(reference, "__self__", None)
    tensors: list[Tensor] = list(owner.parameters()) if isinstance(owner, nn.Module) else []
    tensors += list(inputs.tensors().values())
    return tensors[0].device if tensors else torch.device("cpu")


def _precisions(
    reference: object, dtype: torch.dtype | None, autocast: torch.dtype | bool | None
) -> tuple[Precision, ...]:
    where = "verify"
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ArgumentError(describe(expected="dtype to be a floating-point torch.dtype", got=repr(dtype), where=where))
    if autocast:
        half = torch.bfloat16 if autocast is True else autocast
        if half not in (torch.bfloat16, torch.float16):
            expected = "autocast to be torch.bfloat16, torch.float16 or True (bfloat16)"
            raise ArgumentError(describe(expected=expected, got=repr(autocast), where=where))
        if dtype not in (None, torch.float32):
            expected = "dtype float32 (the weights' dtype) together with autocast"
            raise ArgumentError(describe(expected=expected, got=repr(dtype), where=where))
        return (Precision(torch.float32, half, asked=True),)
    if dtype is not None:
        return () if dtype == torch.float64 else (Precision(dtype, None, asked=True),)
    own = [p.dtype for p in reference.parameters() if is_inexact(p)] if isinstance(reference, nn.Module) else []
    halves = [d for d in own if d in (torch.bfloat16, torch.float16)]
    return (Precision(halves[0] if halves and len(halves) == len(own) else torch.float32, None, asked=False),)


def _optimizer(optimizer: object) -> MakeOptimizer:
    """A callable from parameters to an optimiser, or an optimiser to imitate (its class and defaults)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if len(optimizer.param_groups) > 1:
            fix = "pass a callable, lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            raise ArgumentError(
                describe(expected="one parameter group", got="several", where="verify(optimizer)", fix=fix)
            )
        group = {key: value for key, value in optimizer.param_groups[0].items() if key in optimizer.defaults}
        return lambda parameters: type(optimizer)(parameters, **group)
    if callable(optimizer):
        return optimizer  # type: ignore[return-value]
    expected = "an optimiser or a callable from parameters to one"
    raise ArgumentError(describe(expected=expected, got=repr(optimizer), where="verify(optimizer)"))
