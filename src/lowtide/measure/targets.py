"""From "package.module:attribute" or "path/file.py:attribute" to the object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from lowtide.errors import ArgumentError, describe


def load_target(spec: str) -> object:
    """Import the object that `spec` names: `module:attribute` or `file.py:attribute`; dots in the attribute count.

    Raises:
        ArgumentError: no colon; no such file, module or attribute. An error inside the imported file is left as it is.
    """
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute:
        raise ArgumentError(describe(expected="module:name or file.py:name", got=repr(spec), where="target"))
    found: object = _from_file(where, spec) if where.endswith(".py") else _from_module(where, spec)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ArgumentError(describe(expected=f"a name defined in {where}", got=repr(attribute), where=spec))
        found = getattr(found, name)
    return found


def _from_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # a module that the target itself imports and that is missing is the target's error, not a misspelt target
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        fix = "check the name, or add its folder to PYTHONPATH"
        raise ArgumentError(describe(expected="an importable module", got=repr(name), where=spec, fix=fix)) from None


def _from_file(where: str, spec: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ArgumentError(describe(expected="an existing file", got=where, where=spec))
    name = f"lowtide_target_{path.stem}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None, "a .py file always has a loader"
    assert description.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as `python file.py` does, so that the file finds its neighbours, later imports too
        sys.path.insert(0, folder)
    description.loader.exec_module(module)
    return module
