"""`lowtide env`: what is installed here, and which kernels do the work."""

from __future__ import annotations

import importlib.metadata
import json as json_format
import platform

import torch

import lowtide
from lowtide import kernels
from lowtide.kernels.build import cache_folder

# optional package -> what pip installs it with
OPTIONAL = {
    "torchvision": "lowtide[vision]",
    "scikit-learn": "lowtide[vision]",
    "pillow": "lowtide[vision]",
    "timm": "lowtide[convert]",
    "monai": "lowtide[convert]",
    "matplotlib": "lowtide[plots]",
    "triton": "triton",
}


def env(*, json: bool = False) -> None:
    """Versions, devices and kernel providers found here, and which provider is used and why.

    Args:
        json: Print JSON instead of a table.
    """
    found = environment()
    if json:
        print(json_format.dumps(found, indent=2))
        return
    width = max(len(name) for entries in found.values() for name in entries)
    for section, entries in found.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name:<{width}}  {value}")


def environment() -> dict[str, dict[str, str | int | None]]:
    """The report as nested dictionaries: section -> name -> value."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    used = {"cpu": _used("cpu"), "cuda": _used("cuda") if gpus else "nothing: no CUDA device here"}
    return {
        "versions": {
            "lowtide": lowtide.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "devices": {
            "cpu": platform.machine(),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "cuda": ", ".join(gpus) or "none",
        },
        "kernels": {
            **kernels.states(),
            **{f"used on {device}": text for device, text in used.items()},
            "compiled into": str(cache_folder()),
        },
        "optional packages": {name: _version(name, requirement) for name, requirement in OPTIONAL.items()},
    }


def _used(device: str) -> str:
    choice = kernels.choose(torch.zeros(1, 1, 1, device=device))
    return f"{choice.kernels.name} ({choice.reason})"


def _version(package: str, requirement: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed (pip install '{requirement}')"
