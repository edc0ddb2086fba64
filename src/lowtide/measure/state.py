"""What the measured calls must not change: gradients, buffers and modes of modules, random generators.

Copies are kept as NumPy arrays: those are not made by torch's allocator, so they are in no figure even when they are
taken while a call is being recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class _Copy:
    """The bytes of a dense tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.data = _bytes(tensor)

    def matches(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and tensor.dtype == self.dtype and np.array_equal(_bytes(tensor), self.data)

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.data.copy()).view(self.dtype).reshape(self.shape).to(self.device)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


class SavedState:
    """Gradients, buffers and modes as they were when a module or tensor was first seen; `restore` puts them back.

    Values that the measured function changes on purpose (parameters by an optimiser step, its arguments) are left
    alone.
    """

    def __init__(self) -> None:
        self._modes: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[weakref.ref[Tensor], _Copy]]]
        self._buffers = weakref.WeakKeyDictionary()
        self._grads: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # leaf -> (its gradient, the gradient's bytes)

    def add_module(self, module: nn.Module) -> None:
        """Remember `module` and everything below it."""
        for child in module.modules():
            if child in self._modes:
                continue
            self._modes[child] = child.training
            # the buffers' dict: named_buffers() would give a buffer that two modules share to one of them alone
            buffers = {name: b for name, b in child._buffers.items() if b is not None and _is_plain(b)}
            self._buffers[child] = {name: (weakref.ref(b), _Copy(b)) for name, b in buffers.items()}
            self.add_leaves(child.parameters(recurse=False))

    def add_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Remember the gradient of every leaf among `tensors`."""
        for leaf in tensors:
            if leaf.is_leaf and leaf.requires_grad and leaf not in self._grads:
                grad = leaf.grad
                self._grads[leaf] = (grad, _Copy(grad) if grad is not None and _is_plain(grad) else None)

    def gradients(self) -> list[Tensor]:
        """The gradients that the leaves have now."""
        return [leaf.grad for leaf in self._grads if leaf.grad is not None]

    def clear_gradients(self) -> None:
        """No leaf has a gradient, as after `zero_grad()`: then a backward allocates every one of them."""
        for leaf in self._grads:
            leaf.grad = None

    def restore(self) -> None:
        """Put everything back, in place where the object is still the same."""
        for module, mode in self._modes.items():
            module.training = mode
            for name, (buffer, copy) in self._buffers[module].items():
                module._buffers[name] = _restored(buffer(), copy)
        for leaf, (grad, copy) in self._grads.items():
            leaf.grad = grad if copy is None else _restored(grad, copy)


def _restored(original: Tensor | None, copy: _Copy) -> Tensor:
    if original is None:
        return copy.tensor()
    if not copy.matches(original):
        with torch.no_grad():
            original.copy_(copy.tensor())
    return original


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """The block sees the global generators as they are, and leaves them as they were."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors whose gradient a backward from `outputs` would fill."""
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen, leaves = set(pending), []
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves
