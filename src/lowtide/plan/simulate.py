"""One training step without memory and without arithmetic: the model's own code on fake tensors.

A fake tensor has a shape, a dtype and a device, and a storage that is never filled. The copy of the model that runs has
fake parameters and buffers: nothing of the model itself changes, and nothing of its size is allocated. What lowtide's
compiled passes would allocate on the CPU is allocated, by their own code (`lowtide.kernels.shapes_only`).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map

from lowtide.errors import ArgumentError, LowtideError, UnsupportedError, describe
from lowtide.kernels import shapes_only
from lowtide.levels import Level
from lowtide.measure.call import ResultGradient, differentiable, tensors_in
from lowtide.plan.live import Recorder, Recording
from lowtide.plan.optimizers import MakeOptimizer
from lowtide.plan.parts import Part, parameter_parts, set_levels, spread

Loss = Callable[[Any], Tensor]
WHERE = "plan"


class Simulation:
    """Steps of a fake copy of `model` on inputs of the shapes of `inputs`, at any batch size and levels."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], parts: list[Part], loss: Loss | None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with FakeCopyMode(self._mode):
                self.model = copy.deepcopy(model)
        except Exception as error:
            got = f"{type(error).__name__}: {_first_line(error)}"
            fix = "remove what cannot be copied from it"
            raise UnsupportedError(
                describe(expected="a model that copy.deepcopy can copy", got=got, where=WHERE, fix=fix)
            ) from error
        if not model.training:
            self.model.train()
        self._inputs, self._parts, self._loss = tuple(inputs), parts, loss
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    @property
    def state(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        found = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return list(found.values())

    def inputs(self, batch: int | None = None) -> tuple[Any, ...]:
        """Fake inputs; with `batch` in place of the size of their first axis."""
        size = batch_of(self._inputs)

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape, stride = list(value.shape), list(value.stride())
            if batch is not None and shape and shape[0] == size:
                shape[0] = batch
                stride[0] = max([s * n for s, n in zip(stride[1:], shape[1:], strict=True)], default=1)
            device = self.device if value.is_meta else value.device
            made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
            return made.requires_grad_(value.requires_grad)

        with self._mode:
            return tree_map(fake, self._inputs)

    def run(self, levels: dict[str, Level], batch: int | None = None, autocast: torch.dtype | None = None) -> Recording:
        """Forward and backward with the parts at `levels` (part name -> level).

        Raises:
            ArgumentError: the model's forward fails on the inputs. UnsupportedError: it depends on values.
        """
        set_levels(self.model, spread(self._parts, levels))
        self.model.zero_grad()
        inputs = self.inputs(batch)
        owners = dict(parameter_parts(self.model, self._parts))
        recorder = Recorder(self._mode, owners, [*self.state, *tensors_in(inputs)])
        with _undisturbed(), self._mode, shapes_only(recorder), recorder:
            result = self._forward(inputs, autocast)
            recorder.end_forward()
            recorder.recording.random_states = _ordinary_bytes(result)
            self._backward(result)
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        recorder.recording.gradients = [stored for stored in map(recorder.find, gradients) if stored is not None]
        self.model.zero_grad()
        return recorder.recording

    def _forward(self, inputs: tuple[Any, ...], autocast: torch.dtype | None) -> Any:
        cast = contextlib.nullcontext() if autocast is None else torch.autocast(self.device.type, autocast)
        try:
            with cast:
                result = self.model(*inputs)
                return result if self._loss is None else self._loss(result)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                describe(
                    expected="a forward whose shapes do not depend on values",
                    got=f"{_first_line(error)}",
                    where=WHERE,
                    fix="use lowtide.measure on a small input",
                )
            ) from error
        except LowtideError:
            raise
        except Exception as error:
            shapes = ", ".join("x".join(map(str, t.shape)) or "a scalar" for t in tensors_in(inputs))
            raise ArgumentError(
                describe(
                    expected=f"inputs that the forward of {type(self.model).__name__} takes",
                    got=f"{shapes}, on which it raises {type(error).__name__}: {_first_line(error)}",
                    where=WHERE,
                )
            ) from error

    def _backward(self, result: Any) -> None:
        outputs = differentiable(result)
        if not outputs:
            raise ArgumentError(
                describe(
                    expected="an output with a gradient",
                    got="none",
                    where=WHERE,
                    fix="a parameter has to require grad, and the output to depend on it",
                )
            )
        start = ResultGradient.apply(lambda: [torch.empty_like(output) for output in outputs], *outputs)
        assert isinstance(start, Tensor)
        start.backward(start.detach())

    def optimizer(self, make: MakeOptimizer | None) -> tuple[int, int]:
        """Bytes of the optimiser's state, and what its step takes beside parameters, gradients and state.

        torch's own optimiser makes two steps; on the CPU it takes the parameters one by one: the largest one decides.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if make is None or not trained:
            return 0, 0
        largest = max(trained, key=lambda p: p.numel())
        sample = [largest] if largest.device.type == "cpu" else trained
        with _undisturbed(), self._mode:
            parameters = [nn.Parameter(torch.empty_like(p)) for p in sample]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer = make(parameters)
            before = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
            recorder = Recorder(self._mode, {}, before)
            recorder.answers_item = True
            with recorder:
                optimizer.step()
                end = len(recorder.recording.live)
                optimizer.step()
        state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
        held = sum(t.untyped_storage().nbytes() for t in state)
        peak = max(recorder.recording.live[end:], default=held)
        scalars = sum(t.untyped_storage().nbytes() for t in state if t.dim() == 0) // len(parameters)
        per_byte = (held - scalars * len(parameters)) / sum(p.untyped_storage().nbytes() for p in parameters)
        total = sum(p.numel() * p.element_size() for p in trained)
        return round(per_byte * total) + scalars * len(trained), max(0, peak - held)


def _ordinary_bytes(result: Any) -> int:
    """Bytes of what the graph of a result keeps that is no fake tensor: states of random generators, for dropout."""
    pending = [tensor.grad_fn for tensor in differentiable(result)]
    seen: set[Any] = set(pending)
    found: dict[int, int] = {}
    while pending:
        node: Any = pending.pop()
        for tensor in getattr(node, "saved_tensors", ()):
            if tensor is not None and not isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        following = {below for below, _ in node.next_functions if below is not None} - seen
        seen |= following
        pending += following
    return sum(found.values())


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Generators stay as they are; warnings belong to real runs."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def batch_of(inputs: Sequence[Any]) -> int:
    """Size of the first axis of the first tensor.

    Raises:
        ArgumentError: no tensor, or one without axes or entries.
    """
    found = tensors_in(inputs)
    if not found or found[0].dim() == 0:
        got = "no tensor" if not found else "a tensor without axes"
        raise ArgumentError(describe(expected="inputs with a batch axis in front", got=got, where=WHERE))
    if found[0].shape[0] == 0:
        got = f"a batch of 0, {tuple(found[0].shape)}"
        raise ArgumentError(describe(expected="a batch of at least 1", got=got, where=WHERE))
    return found[0].shape[0]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
