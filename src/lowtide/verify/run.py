"""One step of one module, and a record of everything that an observer could see of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.verify.draws import NotReplayableError, generator_states, same_state, seed_all
from lowtide.verify.subject import Role, Subject
from lowtide.verify.trees import Inputs, Leaves, is_inexact, leaves

Loss = Callable[..., Tensor]
FEW = 3


@dataclass(frozen=True)
class Phase:
    """One part of the run: which mode, with or without a graph, a backward, and gradients for the inputs."""

    name: str
    number: int
    train: bool = True
    grad: bool = True
    backward: bool = False
    input_grad: bool = False
    update: bool = False
    few: bool = False  # a few samples do: what is asked does not depend on the size of the batch


@dataclass
class Setting:
    """What both modules are given, in one dtype."""

    inputs: Inputs
    dtype: torch.dtype
    device: torch.device
    seed: int
    cotangents: Cotangents
    autocast: torch.dtype | None = None
    loss: Loss | None = None
    target: object = None
    forwards: int = 1
    accumulate: int = 1
    backward_twice: bool = False

    def loss_arguments(self) -> tuple[object, ...]:
        """What the loss takes after the output."""
        return () if self.target is None else (self.target,)

    def to_try(self, phase: Phase) -> list[Setting]:
        """This setting; for a phase that needs only a few samples, one with three of them before it.

        Three of the inputs' first axis, if all have the same; the second is for models that do not run with three. The
        random projection takes the place of a loss, which may expect all samples.
        """
        sizes = {t.shape[0] if t.dim() else 0 for t in self.inputs.tensors().values()}
        if not phase.few or len(sizes) != 1 or sizes.pop() <= FEW:
            return [self]
        few = dataclasses.replace(self, inputs=self.inputs.map(lambda t: t[:FEW]), loss=None, target=None)
        return [few, self]

    @property
    def label(self) -> str:
        """The dtype as printed: float64, bfloat16, autocast bfloat16."""
        return f"autocast {short(self.autocast)}" if self.autocast else short(self.dtype)


def short(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Record:
    """What one phase showed. Gradients that did not come are None."""

    outputs: Leaves = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    input_grads: dict[str, Tensor | None] = field(default_factory=dict)
    param_grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers_before_backward: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, object] = field(default_factory=dict)
    inputs_changed: dict[str, Tensor] = field(default_factory=dict)
    drew: bool = False  # random numbers were drawn


class RunError(Exception):
    """The module raised; `cause` is what it raised."""

    def __init__(self, role: Role, phase: str, cause: Exception) -> None:
        super().__init__(f"the {role} raised in {phase}: {type(cause).__name__}: {cause}")
        self.role: Role = role
        self.phase = phase
        self.cause = cause


class Observer(Protocol):
    """Something attached to a subject for one run: hooks that record what passes."""

    def forward_done(self) -> None:
        """Called between forward and backward."""

    def backward_done(self) -> None:
        """Called at the end of the run."""


class Cotangents:
    """The fixed random projection: loss = sum over outputs of <w, output>, so that w is the gradient of each output.

    w is one of +-4/16 .. +-32/16 times a power of two near 1 / sqrt(size): exact in every dtype, half precision too.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def of(self, name: str, output: Tensor) -> Tensor:
        """The same numbers for the same name and shape, in `output`'s dtype."""
        key = (name, tuple(output.shape))
        if key not in self._made:
            # numpy's, so that a mode that records or replays torch's random numbers does not meet them
            generator = np.random.default_rng((self._seed, len(self._made)))
            parts = [self._draw(output, generator) for _ in range(2 if output.is_complex() else 1)]
            self._made[key] = torch.complex(*parts) if output.is_complex() else parts[0]
        return self._made[key].to(output.device, output.dtype)

    @staticmethod
    def _draw(output: Tensor, generator: np.random.Generator) -> Tensor:
        shape = tuple(output.shape)
        signed = generator.integers(4, 33, shape) * generator.choice([-1, 1], shape)
        scale = 2.0 ** -round(math.log2(max(1, output.numel())) / 2)
        return torch.as_tensor(signed, dtype=torch.float64) / 16 * scale


def run(
    subject: Subject,
    phase: Phase,
    setting: Setting,
    *,
    during: contextlib.AbstractContextManager[object] | None = None,
    during_forward: contextlib.AbstractContextManager[object] | None = None,
    observer: Observer | None = None,
) -> Record:
    """Run `phase` and record it. Parameters keep their gradients for an optimiser; they are not changed here.

    Raises:
        RunError: the module raised.
    """
    subject.set_training(phase.train)
    subject.clear_grads()
    seed_all(setting.seed + phase.number)
    before = generator_states(setting.device)
    record = Record()
    micro_steps = setting.accumulate if phase.backward else 1
    forwards = setting.forwards if phase.backward else 1
    try:
        with _default_dtype(setting.dtype), during or contextlib.nullcontext():
            for micro in range(micro_steps):
                calls = []
                with torch.set_grad_enabled(phase.grad), _autocast(setting), during_forward or contextlib.nullcontext():
                    for index in range(micro * forwards, (micro + 1) * forwards):
                        calls.append(_Call(subject, setting, phase, index))
                for call in calls:
                    call.note_outputs(record)
                if observer is not None:
                    observer.forward_done()
                if phase.backward:
                    record.buffers_before_backward = _cloned(subject.buffers())
                    _backward(calls, setting)
                for call in calls:
                    call.note_inputs(record)
            if observer is not None:
                observer.backward_done()
    except (RunError, NotReplayableError):
        raise
    except Exception as error:
        raise RunError(subject.role, phase.name, error) from error
    if phase.backward:
        record.param_grads = {name: _dense(parameter.grad) for name, parameter in subject.parameters().items()}
    record.buffers = _cloned(subject.buffers())
    record.generators = generator_states(setting.device)
    record.drew = not same_state(before, record.generators)
    return record


def _cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class _Call:
    """One forward: what went in, what came out."""

    def __init__(self, subject: Subject, setting: Setting, phase: Phase, index: int) -> None:
        self._suffix = f" (forward {index + 1})" if index else ""
        self._pristine = setting.inputs.variant(index)
        self._leaves = self._pristine
        if phase.input_grad:
            self._leaves = self._pristine.map(lambda t: t.clone().requires_grad_() if is_inexact(t) else t)
        # not the leaf itself: an in-place change of the input is to be seen, not to be refused by autograd
        self._given = self._leaves.map(lambda t: t.clone())
        self._tree = subject(self._given)
        self.loss = setting.loss(self._tree, *setting.loss_arguments()) if phase.backward and setting.loss else None
        self.outputs = {name + self._suffix: leaf for name, leaf in leaves(self._tree, "output").items()}

    def note_outputs(self, record: Record) -> None:
        for name, leaf in self.outputs.items():
            record.outputs[name] = leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            if isinstance(leaf, Tensor):
                record.requires_grad[name] = leaf.requires_grad

    def note_inputs(self, record: Record) -> None:
        leaf_tensors, given = self._leaves.tensors(), self._given.tensors()
        for name, pristine in self._pristine.tensors().items():
            if leaf_tensors[name].requires_grad:
                record.input_grads[name + self._suffix] = _dense(leaf_tensors[name].grad)
            if not _same_values(given[name], pristine):
                record.inputs_changed[name + self._suffix] = given[name].detach().clone()


def _backward(calls: list[_Call], setting: Setting) -> None:
    """One backward for all `calls`, or two over the same graph; nothing where no output has a graph."""
    tensors, cotangents = [], []
    for call in calls:
        if call.loss is not None:
            tensors.append(call.loss)
            cotangents.append(torch.ones_like(call.loss))
            continue
        for name, leaf in call.outputs.items():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                tensors.append(leaf)
                cotangents.append(setting.cotangents.of(name, leaf))
    if not any(t.requires_grad for t in tensors):
        return
    if setting.backward_twice:
        torch.autograd.backward(tensors, cotangents, retain_graph=True)
    torch.autograd.backward(tensors, cotangents)


def _autocast(setting: Setting) -> contextlib.AbstractContextManager[object]:
    if setting.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(setting.device.type, dtype=setting.autocast)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Constants that a module makes in its forward are float64 in a float64 run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _same_values(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))
