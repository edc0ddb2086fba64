"""`lowtide bench`: the cases that people bring, run here, in fresh processes."""

from __future__ import annotations

import json as json_format
import resource
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from lowtide.errors import ArgumentError, describe
from lowtide.levels import check_level
from lowtide.measure import format_bytes
from lowtide.measure.child import run_in_child
from lowtide.measure.units import format_seconds, parse_bytes
from lowtide.nn import SGConv


def bench(
    case: Annotated[Literal["notebook"], tyro.conf.Positional] = "notebook",
    *,
    features: int = 256,
    length: int = 1_000_000,
    recompute: str = "layer",
    limit: str | None = None,
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Time and memory of one case in fresh processes.

    notebook: the two-sided SGConv layer with kernel_dim 32 on an input of 1 x 256 x 1,000,000, forward without
    gradient, then forward and backward. Memory is the high-water of the process over its base, which holds torch, the
    layer and the input; 1 U is the size of the input. The plain form (--recompute none) needs some 20 U.

    Args:
        case: notebook.
        features: Features of the layer.
        length: Length of the sequence.
        recompute: Memory level: none, pointwise, layer, block.
        limit: Bound the address space of the processes, as `ulimit -v` does: 8GB.
        threads: Threads to compute on; all cores by default.
        json: Print JSON instead of a table.
    """
    check_level(recompute, "--recompute")
    for flag, value in (("--features", features), ("--length", length), ("--threads", threads)):
        if value is not None and value < 1:
            raise ArgumentError(describe(expected="at least 1", got=str(value), where=flag))
    limit_bytes = None if limit is None else parse_bytes(limit, "--limit")
    unit = features * length * 4
    env = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    result: dict[str, Any] = {"case": case, "features": features, "length": length, "recompute": recompute}
    result |= {"unit_bytes": unit, "limit_bytes": limit_bytes}
    kwargs = {"features": features, "length": length, "recompute": recompute, "limit_bytes": limit_bytes}
    for name, backward in (("forward", False), ("forward_backward", True)):
        asked = kwargs | {"backward": backward}
        figures = run_in_child(f"{__name__}:notebook", asked, steps=1, parts=["process"], env=env, timeout_s=3600.0)
        assert "process_high_water_bytes" in figures
        assert "seconds" in figures
        high_water, seconds = figures["process_high_water_bytes"], figures["seconds"]
        result[name] = {"peak_bytes": high_water, "peak_units": high_water / unit, "seconds": seconds}
    if json:
        print(json_format.dumps(result, indent=2))
        return
    print(f"two-sided SGConv, 1 x {features} x {length}, recompute {recompute}; 1 U = {format_bytes(unit)}")
    for name, words in (("forward", "forward without gradient"), ("forward_backward", "forward and backward")):
        entry = result[name]
        peak = f"{entry['peak_units']:.2f} U = {format_bytes(entry['peak_bytes'])}"
        print(f"{words:<26}{peak:>20}{format_seconds(entry['seconds']):>12}")


def notebook(
    features: int, length: int, recompute: str, limit_bytes: int | None, backward: bool
) -> tuple[Callable[[Tensor], Any], Tensor]:
    """What the child process builds and measures: a step, and its input."""
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    torch.manual_seed(0)
    level = check_level(recompute, "notebook")
    layer = SGConv(features, length, kernel_dim=32, bidirectional=True, recompute=level)
    x = torch.randn(1, features, length, requires_grad=backward)
    if backward:
        return layer, x

    def forward(x: Tensor) -> None:
        with torch.no_grad():
            layer(x)

    return forward, x
