"""What autograd keeps for backward, by storage, over time: torch's saved-tensor hooks and a ledger.

A storage counts once however many nodes and views keep it, with its whole size (a view keeps all of its storage
alive), from the first node that saves it to the last one that frees it. Tensors that bypass `save_for_backward` (an
attribute of ctx, a cache) are not seen here; `Measurement.outside_autograd` shows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.measure.modules import ModuleTracker

Kind = Literal["made", "input", "outside", "parameter"]


@dataclass
class KeptStorage:
    """One storage while at least one node keeps it.

    `kind` is "made" (by the call), "input" (an argument), "outside" (there before the call, but no argument: a
    closure's tensor) or "parameter" (parameter or buffer of a module). Only the last is not part of `saved_bytes`.
    `module` ran when it was first saved.
    """

    address: int
    nbytes: int
    kind: Kind
    module: str
    shape: tuple[int, ...]
    dtype: str
    uses: int = 1


class _Kept:
    """What a node holds instead of the tensor. Its death is the node's release."""

    __slots__ = ("keys", "ledger", "tensor")

    def __init__(self, tensor: Tensor, keys: list[int], ledger: Ledger) -> None:
        self.tensor, self.keys, self.ledger = tensor, keys, ledger

    def __del__(self) -> None:
        self.ledger.release(self.keys)


class Ledger:
    """Storages kept now, and the moment at which their sum was largest."""

    def __init__(self, modules: ModuleTracker, arguments: Iterable[Tensor]) -> None:
        self._modules = modules
        self._inputs = {key for t in arguments for key, _ in storages_of(t)}
        self._parameters: set[int] = set()
        self._kept: dict[int, KeptStorage] = {}
        self._lock = threading.RLock()  # a release can interrupt a save, when the garbage collector runs in it
        self._live = {True: 0, False: 0}  # is it a parameter? -> bytes
        self.saved_bytes = 0
        self.parameter_bytes = 0
        self.at_peak: list[KeptStorage] = []
        self._peak_is_stale = False
        self.history: list[tuple[int, int]] = []  # (Unix time in ns, bytes kept without parameters)

    def add_module(self, module: nn.Module) -> None:
        """The parameters and buffers of `module` are no activations."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._parameters.update(key for key, _ in storages_of(tensor))

    def hooks(self) -> AbstractContextManager[None]:
        """Active over forward AND backward: what a recompute saves counts too."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Kept:
        keys = []
        with self._lock:
            for key, storage in storages_of(tensor):
                keys.append(key)
                if key in self._kept:
                    self._kept[key].uses += 1
                else:
                    self._kept[key] = self._enter(key, storage, tensor)
            if self._live[False] > self.saved_bytes:
                self.saved_bytes = self._live[False]
                self._peak_is_stale = True
            self.parameter_bytes = max(self.parameter_bytes, self._live[True])
            self.history.append((time.time_ns(), self._live[False]))
        return _Kept(tensor, keys, self)

    def _enter(self, key: int, storage: torch.UntypedStorage, tensor: Tensor) -> KeptStorage:
        kind: Kind = "made"
        # a view of a parameter (the transpose that a linear layer saves) shares its storage, and knows its base
        if key in self._parameters or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            kind = "parameter"
        elif key in self._inputs:
            kind = "input"
        self._live[kind == "parameter"] += storage.nbytes()
        return KeptStorage(
            storage.data_ptr(), storage.nbytes(), kind, self._modules.current, tuple(tensor.shape), str(tensor.dtype)
        )

    @staticmethod
    def _unpack(kept: _Kept) -> Tensor:
        return kept.tensor

    def release(self, keys: list[int]) -> None:
        with self._lock:
            self.keep_peak()
            for key in keys:
                storage = self._kept[key]
                storage.uses -= 1
                if storage.uses == 0:
                    del self._kept[key]
                    self._live[storage.kind == "parameter"] -= storage.nbytes
            self.history.append((time.time_ns(), self._live[False]))

    def keep_peak(self) -> None:
        """Copy the list of kept storages if their sum is a new maximum: once per climb, when the first is released."""
        if self._peak_is_stale:
            self.at_peak = self.kept_now()
            self._peak_is_stale = False

    def kept_now(self) -> list[KeptStorage]:
        """The storages kept now, largest first."""
        with self._lock:
            return sorted(self._kept.values(), key=lambda s: -s.nbytes)


def storages_of(tensor: Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """(identity, storage) of each storage behind a tensor, with the parts of sparse tensors and wrapper subclasses."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        storage = tensor.untyped_storage()
        return [(storage._cdata, storage)]
    return [pair for part in parts if isinstance(part, Tensor) for pair in storages_of(part)]
