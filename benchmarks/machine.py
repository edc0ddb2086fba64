"""Where figures come from (machine, versions, commit), and the CSV file that keeps them."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lowtide import kernels

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("torchvision", "timm", "monai", "fft-conv-pytorch", "julius", "nvsubquadratic")
console = Console(width=150)


def machine() -> dict[str, str]:
    """The columns that every row of one run shares."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels.select(torch.zeros(1, 1, 1, device=device)).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peers": " ".join(f"{name} {version}" for name in PEERS if (version := installed_version(name))),
        "commit": commit(),
    }


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of the work tree, with "+" if what is measured has been changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    return head + ("+" if git("status", "--porcelain", "--", "src", "benchmarks/*.py") else "") if head else "unknown"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()} x{os.cpu_count()}"
    return platform.processor() or platform.machine()


def file_name(section: str, only: str, about: dict[str, str]) -> str:
    """Hardware and date are in the name."""
    hardware = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    return f"{'-'.join(filter(None, [section, only, hardware]))}-{about['at'][:10]}.csv"


def write_csv(path: Path, figures: Sequence[Any], about: dict[str, str], command: str) -> None:
    """One row per figure, written beside its final name and moved into place."""
    shared = about | {"command": command}
    beside = path.with_suffix(".csv.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*vars(figures[0]), *shared], lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(f) | shared for f in figures)
    os.replace(beside, path)
    console.print(f"wrote {path}")
