"""Memory in use now and at most, as the progress line shows it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch


class MemoryUse(NamedTuple):
    """Bytes. On a GPU: what torch has allocated. On the CPU: the process's resident memory, libraries included."""

    now: int
    peak: int


def memory_use(device: torch.device) -> MemoryUse:
    if device.type == "cuda":
        return MemoryUse(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    # Linux counts the peak in KiB, macOS in bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return MemoryUse(peak, peak)
    return MemoryUse(resident_pages * os.sysconf("SC_PAGE_SIZE"), peak)
