"""Optional packages: imported where they are used, with the install command in the error."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from lowtide.errors import MissingDependencyError, describe


def import_extra(module: str, package: str, extra: str) -> Any:
    """The imported `module` of `package`, which lowtide's `extra` installs.

    Raises:
        MissingDependencyError: it is not installed; the message says how to install it.
    """
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        fix = f'run: pip install "lowtide[{extra}]"'
        raise MissingDependencyError(describe(expected=package, got=error, where=module, fix=fix)) from None
    return found
