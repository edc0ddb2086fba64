"""What forbids to run a module's parts without calling them: sharing, weight tying, hooks."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from lowtide.nn.describe import is_hooked


class Obstacles:
    """Names of every module and parameter of a model, also of those that occur more than once."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[int, list[str]] = defaultdict(list)
        self._parameters: dict[int, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules[id(module)].append(name)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameters[id(parameter)].append(f"{name}.{key}" if name else key)

    def of(self, module: nn.Module, path: str) -> str | None:
        """Why the parts of `module`, which stands at `path`, have to be called; None if they need not be."""
        if "forward" in module.__dict__:
            return "it has a forward of its own, set on the instance"
        inside = f"{path}." if path else ""
        for name, child in module.named_modules(remove_duplicate=False):
            others = [other for other in self._modules[id(child)] if other != inside + name and other != path]
            if name and others:
                return f"{name} is shared: it is also {others[0]}"
            if name and is_hooked(child):
                return f"{name} has a hook or a forward of its own, which needs the module to be called"
            for key, parameter in child._parameters.items():
                own = ".".join(part for part in (path, name, key) if part)
                tied = [other for other in self._parameters.get(id(parameter), ()) if other != own]
                if tied:
                    return f"{f'{name}.{key}' if name else key} is tied: it is also {tied[0]}"
        others = [other for other in self._modules[id(module)] if other != path]
        if others:
            return f"it is shared: it is also {others[0]}"
        return None
