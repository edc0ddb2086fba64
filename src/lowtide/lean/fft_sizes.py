"""Sizes of transforms and of the tiles they work on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

MIB = 2**20


def fast_length(least: int) -> int:
    """The smallest number >= least that is 2 (from 512 on: 32) times a product of 2s, 3s and 5s.

    Measured on a CPU: with the factor 32 every such size costs about the same per sample; with a single 2, half as much
    again (docs/log.md).

    >>> [fast_length(n) for n in (1, 7, 2017, 131071, 1000003)]
    [2, 8, 2048, 131072, 1024000]
    """
    unit = 2 if least < 512 else 32
    best = unit
    while best < least:
        best *= 2
    five = unit
    while five < best:
        three = five
        while three < best:
            size = three
            while size < least:
                size *= 2
            best = min(best, size)
            three *= 3
        five *= 5
    return best


@cache
def last_level_cache_bytes() -> int:
    """Bytes of the CPU's last-level cache as Linux reports it; 16 MiB where it reports none."""
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20}.get(text[-1:], 0)
        found.append(int(text[:-1]) * scale if scale else 0)
    return max(found) or 16 * MIB


def rows_per_tile(numbers: int, N: int, itemsize: int, device: torch.device, tile_bytes: int | None) -> tuple[int, int]:
    """Rows of N numbers that one buffer of a tile should hold, and the least rows worth a call.

    By default a buffer holds a sixteenth of the input (`numbers`), within 2 MiB and a quarter of the last-level cache
    (8 and 64 MiB on an accelerator). At least as many rows as threads: one long transform per core beats one transform
    on all cores, and the library hands whole rows to the threads as soon as there are enough of them.
    """
    on_cpu = device.type == "cpu"
    least_rows = torch.get_num_threads() if on_cpu else 1
    if tile_bytes is None:
        least, most = (2 * MIB, max(2 * MIB, last_level_cache_bytes() // 4)) if on_cpu else (8 * MIB, 64 * MIB)
        tile_bytes = min(most, max(least, numbers * itemsize // 16))
    return max(1, tile_bytes // (N * itemsize)), least_rows
