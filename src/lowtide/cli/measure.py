"""`lowtide measure`: bytes kept for backward, peak memory and time of one training step of a model."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from lowtide.cli.shapes import random_inputs
from lowtide.errors import ArgumentError, describe
from lowtide.levels import check_level
from lowtide.measure import format_bytes
from lowtide.measure import measure as measure_call
from lowtide.measure.call import choose_device
from lowtide.measure.child import ChildFigures, run_in_child
from lowtide.measure.html import PAGE_SUFFIXES, save_html
from lowtide.measure.timeline import PLOT_SUFFIXES, check_output, save_plot
from lowtide.models.resolve import Model, resolve_model


def measure(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    *,
    input: str | None = None,
    recompute: str | None = None,
    repeats: int = 5,
    device: str = "cpu",
    operators: bool = False,
    process: bool = False,
    seed: int = 0,
    json: bool = False,
    html: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Bytes kept for backward, peak memory and time of a forward and backward.

    Args:
        model: module:factory, file.py:factory, or a built-in name: torchvision:NAME, timm:NAME,
            monai:densenet121-3d, lowtide:densenet_bc-100-12.
        input: Shape of the input, as 8x3x32x32,8x10 for two; without it the factory must return (module, inputs).
        recompute: Memory level to set on the model: none, pointwise, layer, block.
        repeats: Runs; the first is recorded, the others are timed.
        device: cpu or cuda.
        operators: Count FLOPs and the operators that run again in backward, in one more run.
        process: Also the high-water of fresh processes (Linux, CPU).
        seed: Of weights and inputs.
        json: Print JSON instead of a table.
        html: Write a page with the timeline to this file (needs matplotlib).
        plot: Write the timeline to this .png, .svg or .pdf file (needs matplotlib).
    """
    if html is not None:
        check_output(html, PAGE_SUFFIXES, "--html")
    if plot is not None:
        check_output(plot, PLOT_SUFFIXES, "--plot")
    fn, *args = build_step(model, input, recompute, seed)
    if isinstance(fn, torch.nn.Module):
        fn = fn.to(choose_device(abs, args, device))
    result = measure_call(fn, *args, repeats=repeats, device=device, operators=operators)
    figures: ChildFigures = {}
    if process:
        keywords = {"model": model, "input": input, "recompute": recompute, "seed": seed}
        figures = run_in_child("lowtide.cli.measure:build_step", keywords, steps=repeats)
    if html is not None:
        save_html(result, f"{model} {input or ''}".strip(), html)
    if plot is not None:
        save_plot(result, plot)
    if json:
        print(json_format.dumps(json_format.loads(result.to_json()) | ({"process": figures} if process else {})))
        return
    print(result)
    if process:
        print("\n".join(["", "in fresh processes, over their base", *_process_lines(figures)]))


def build_step(model: str, input: str | None, recompute: str | None, seed: int) -> tuple[Model, *tuple[Any, ...]]:
    """The model that `model` names and its inputs: (callable, *arguments)."""
    torch.manual_seed(seed)
    fn, inputs = resolve_model(model)
    if recompute is not None:
        if not hasattr(fn, "set_recompute"):
            expected = "a model with set_recompute"
            raise ArgumentError(describe(expected=expected, got=type(fn).__name__, where="--recompute"))
        fn.set_recompute(check_level(recompute, "--recompute"))  # type: ignore[attr-defined]
    if input is not None:
        return fn, *random_inputs(input, seed)
    if inputs is None:
        fix = "give --input 8x3x32x32, or let the factory return (module, inputs)"
        raise ArgumentError(describe(expected="inputs", got="none", where=model, fix=fix))
    return fn, *inputs


def _process_lines(figures: ChildFigures) -> list[str]:
    rows = (
        ("allocation peak", figures.get("peak_bytes"), "exact, torch's allocator"),
        ("library scratch", figures.get("library_scratch_bytes"), "buffers of libraries, code loaded on first use"),
        ("high-water", figures.get("high_water_bytes"), "the two above"),
        ("holes in the heap", figures.get("malloc_bytes"), "malloc as it comes, on top"),
    )
    return [f"{name:<20} {format_bytes(size):>10}  {meaning}" for name, size, meaning in rows if size is not None]
