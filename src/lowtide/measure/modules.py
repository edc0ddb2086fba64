"""Which module is running: names for what is kept and allocated, and the state to put back afterwards.

`nn.Module.__call__` is replaced while the tracker is active, as torch.fx does when it traces. Forward hooks would be
the public way, but a lean block rightly leaves its lean path when somebody hooks it, and then another network would
be measured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

MARK = "lowtide.module: "


class ModuleTracker:
    """The stack of running modules by qualified name.

    `on_root(module)` is called once per outermost module, before it runs: its names are relative to it.
    """

    def __init__(self, on_root: Callable[[nn.Module], None]) -> None:
        self._on_root = on_root
        # weak, so that a module which the call makes and drops is not kept alive by the meter
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._local = threading.local()  # on CUDA the backward, and a recompute in it, runs on another thread

    @property
    def _stack(self) -> list[str]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    @property
    def current(self) -> str:
        """Qualified name of the innermost running module, "" outside of all."""
        return self._stack[-1] if self._stack else ""

    def add_root(self, module: nn.Module) -> None:
        """Name a module and its children; done by itself when an unknown module is called."""
        self._on_root(module)
        for name, child in module.named_modules():
            self._names.setdefault(child, name or type(module).__name__)

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            self.add_root(module)
        return self._names[module]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Track calls of modules; every call is also a labelled range in a running profiler."""
        plain_call = nn.Module.__call__

        def tracked_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain_call(module, *args, **kwargs)
            name = self._name(module)
            stack = self._stack
            stack.append(name)
            try:
                with record_function(MARK + name):
                    return plain_call(module, *args, **kwargs)
            finally:
                stack.pop()

        nn.Module.__call__ = tracked_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = plain_call  # type: ignore[method-assign]
