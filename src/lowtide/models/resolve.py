"""A model by name: "module:factory", "file.py:factory", or a built-in name such as "torchvision:densenet121".

| built-in name | what it is |
| --- | --- |
| torchvision:NAME | `torchvision.models.get_model(NAME, weights=None)` |
| timm:NAME | `timm.create_model(NAME)` |
| monai:densenet121-3d | MONAI's densenet 121, 169, 201, 264; -1d, -2d (or nothing), -3d; 1 input channel, 2 classes |
| lowtide:densenet121 | any `densenetNNN` of `lowtide.models` |
| lowtide:densenet_bc-100-12 | `lowtide.models.densenet_bc(100, 12)` |
| lowtide:long_conv, lowtide:sgconv-sum, ... | a small network around one part, see `lowtide.models.built_in` |
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lowtide.errors import ArgumentError, MissingDependencyError, describe
from lowtide.measure import load_target

Model = Callable[..., Any]


def resolve_model(spec: str) -> tuple[Model, tuple[Any, ...] | None]:
    """Build the model that `spec` names; the second value is its inputs if the factory gave them, else None.

    A factory is a callable without required arguments that returns a module (or another callable), or (module, inputs)
    with a tensor or a tuple of positional arguments. A module instance can be named as well.

    Raises:
        ArgumentError: no such name, or the factory returns something else. An error inside it is left as it is.
        MissingDependencyError: a built-in name of a package that is not installed.
    """
    package, _, name = spec.partition(":")
    if package in BUILT_IN:
        return BUILT_IN[package](name, spec), None
    found = load_target(spec)
    built = found if isinstance(found, nn.Module) else _call(found, spec)
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not callable(model):
        expected = "the factory to return a module or (module, inputs)"
        raise ArgumentError(describe(expected=expected, got=type(model).__name__, where=spec))
    if inputs is None or isinstance(inputs, tuple):
        return model, inputs
    return model, (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)


def _call(factory: object, spec: str) -> Any:
    if not callable(factory):
        expected = "a callable that returns a module"
        raise ArgumentError(describe(expected=expected, got=type(factory).__name__, where=spec))
    return factory()


def _import(package: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise MissingDependencyError(f'models of {name} need it: pip install "lowtide[{extra}]"') from error


def _torchvision(name: str, spec: str) -> nn.Module:
    models = _import("torchvision.models", "vision")
    if name not in models.list_models():
        raise ArgumentError(
            describe(expected="a model of torchvision.models.list_models()", got=repr(name), where=spec)
        )
    return models.get_model(name, weights=None)


def _timm(name: str, spec: str) -> nn.Module:
    timm = _import("timm", "convert")
    if not timm.is_model(name):
        raise ArgumentError(describe(expected="a model of timm.list_models()", got=repr(name), where=spec))
    return timm.create_model(name)


def _monai(name: str, spec: str) -> nn.Module:
    match = re.fullmatch(r"densenet(121|169|201|264)(?:-([123])d)?", name)
    if match is None:
        expected = "densenet121, 169, 201 or 264, with -1d, -2d or -3d"
        raise ArgumentError(describe(expected=expected, got=repr(name), where=spec))
    nets = _import("monai.networks.nets", "convert")
    return getattr(nets, f"DenseNet{match[1]}")(spatial_dims=int(match[2] or 2), in_channels=1, out_channels=2)


def _lowtide(name: str, spec: str) -> nn.Module:
    models = importlib.import_module("lowtide.models")
    if match := re.fullmatch(r"densenet_bc-(\d+)-(\d+)", name):
        return models.densenet_bc(int(match[1]), int(match[2]))
    if re.fullmatch(r"densenet\d+", name) and hasattr(models, name):
        return getattr(models, name)()
    parts = importlib.import_module("lowtide.models.built_in").PARTS
    if name in parts:
        return parts[name].build()
    expected = "densenet121, 161, 169, 201, 264, densenet_bc-DEPTH-GROWTH or a part (lowtide verify --list names them)"
    raise ArgumentError(describe(expected=expected, got=repr(name), where=spec))


BUILT_IN: dict[str, Callable[[str, str], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "monai": _monai,
    "lowtide": _lowtide,
}
