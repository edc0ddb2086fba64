"""Any tree of tensors (tuples, lists, dicts, named tuples, dataclasses) as named leaves, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe

Leaves = dict[str, object]


def leaves(tree: object, name: str) -> Leaves:
    """The leaves of `tree` by path: `output`, `output[0]`, `output['logits']`, `output.hidden`.

    >>> leaves({"a": 1, "b": [2, 3]}, "output")
    {"output['a']": 1, "output['b'][0]": 2, "output['b'][1]": 3}
    """
    found: Leaves = {}
    _collect(tree, name, found)
    return found


def _collect(tree: object, name: str, found: Leaves) -> None:
    children = _children(tree, name)
    if children is None:
        found[name] = tree
        return
    for child_name, child in children.items():
        _collect(child, child_name, found)


def _children(tree: object, name: str) -> dict[str, object] | None:
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, Mapping):
        return {f"{name}[{key!r}]": value for key, value in tree.items()}
    if isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        return {f"{name}.{key}": value for key, value in zip(fields, tree, strict=True)}
    if isinstance(tree, (tuple, list)):
        return {f"{name}[{i}]": value for i, value in enumerate(tree)}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f"{name}.{f.name}": getattr(tree, f.name) for f in dataclasses.fields(tree)}
    return None


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> object:
    """`tree` with `function` applied to each tensor; containers are new, other leaves are shared."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    if isinstance(tree, (tuple, list)):
        make: Any = type(tree)
        items = [map_tensors(value, function) for value in tree]
        return make(*items) if hasattr(tree, "_fields") else make(items)  # a named tuple takes its fields one by one
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: map_tensors(getattr(tree, f.name), function) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **fields)
    return tree


def is_inexact(value: object) -> bool:
    """Whether `value` is a floating-point or complex tensor: the ones that can have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype` where it is floating-point, in the complex dtype of that precision where it is complex."""
    if value.is_complex():
        return value.to(_COMPLEX.get(dtype, torch.complex64))
    return value.to(dtype) if value.is_floating_point() else value


class Inputs:
    """The arguments of one call: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args = args
        self.kwargs = kwargs

    @classmethod
    def of(cls, inputs: object) -> Inputs:
        """Raises `ArgumentError` unless `inputs` is a tensor, a tuple, or a dict with string keys."""
        if isinstance(inputs, Tensor):
            return cls((inputs,), {})
        if isinstance(inputs, tuple):
            return cls(tuple(inputs), {})
        if isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs):
            return cls((), dict(inputs))
        raise ArgumentError(
            describe(
                expected="inputs to be a tensor, a tuple of positional arguments or a dict of keyword arguments",
                got=type(inputs).__name__,
                where="verify",
                fix="wrap a single list argument as (the_list,)" if isinstance(inputs, list) else "",
            )
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """New inputs with `function` applied to each tensor."""
        args = tuple(map_tensors(arg, function) for arg in self.args)
        return Inputs(args, {key: map_tensors(value, function) for key, value in self.kwargs.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by path; the only argument is called `input`."""
        trees: dict[str, object] = {f"input[{i}]": arg for i, arg in enumerate(self.args)}
        if len(trees) == 1 and not self.kwargs:
            trees = {"input": self.args[0]}
        trees |= {f"input[{key!r}]": value for key, value in self.kwargs.items()}
        found = {}
        for name, tree in trees.items():
            found |= {path: leaf for path, leaf in leaves(tree, name).items() if isinstance(leaf, Tensor)}
        return found

    def variant(self, index: int) -> Inputs:
        """Other inputs of the same shapes, for the `index`-th of several forwards; exact in every dtype."""
        return self if index == 0 else self.map(lambda t: _varied(t, index))


def _varied(value: Tensor, index: int) -> Tensor:
    """Rolled along the last axis (integers stay in their range) and halved (a power of two is exact)."""
    rolled = value.roll(index, -1) if value.dim() else value
    return rolled * 0.5**index if is_inexact(rolled) else rolled
