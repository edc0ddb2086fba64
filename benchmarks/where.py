"""Where the time of a training step goes, against the floor of its arithmetic: `python benchmarks/where.py [CASE ...]`.

A floor is max(operations / product rate, bytes / memory speed), from what this machine reached in the same run:
    product rate   the largest of a float32 product of 2048 x 2048 matrices and 1x1 and 3x3 convolutions of 256 channels
    memory speed   a copy between two buffers of 128 MiB, bytes read plus bytes written

Operations are those of the products alone, a multiply and an add each. Bytes are those that a pass must move if nothing
stays in a cache between two passes: every map that it reads or writes, once each (the optimizer: weight, gradient and
momentum, and two of them written). Milliseconds are those of torch's profiler, means over steps; the step beside them
is a median without it. A pass is a call of the provider (`lowtide.kernels.interface`); what else torch computes stands
under it, and what is left is the time of Python and of the autograd engine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

import densenet
from lowtide.kernels import Kernels, select

PASS = "pass: "
# the stem's, and the products in the backward of transitions
CONVOLUTIONS = {"aten::convolution": "torch's convolutions", "aten::convolution_backward": "their backward"}
STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "bc100-pointwise": lambda: densenet.bc100("pointwise"),
    "bc100-layer": lambda: densenet.bc100("layer"),
    "densenet121-pointwise": lambda: densenet.densenet121(level="pointwise"),
    "densenet121-layer": lambda: densenet.densenet121(level="layer"),
    "3d-layer": lambda: densenet.densenet121_3d(level="layer"),
}
# maps by the names that they have in the interface: read or written once, or both
ONCE = ("x", "grad", "grad_z", "out", "choice", "masked")
READ_AND_WRITTEN = ("total",)
CHANGED_IN_PLACE = {"act_backward_sums_": ("grad",), "affine_add_": ("grad",)}


@dataclass
class Row:
    """One kind of work in a step: calls, seconds, operations and bytes of one step."""

    name: str
    calls: float = 0.0
    seconds: float = 0.0
    operations: float = 0.0
    moved: float = 0.0

    def floor(self, rate: float, speed: float) -> float:
        return max(self.operations / rate, self.moved / speed)


def bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def cost(name: str, given: dict[str, Any]) -> tuple[float, float]:
    """Operations and bytes of one call of a pass, from its arguments by name."""
    twice = (*READ_AND_WRITTEN, *CHANGED_IN_PLACE.get(name, ()))
    moved = 0.0
    for argument in (*ONCE, *READ_AND_WRITTEN):
        if isinstance(given.get(argument), Tensor):
            moved += bytes_of(given[argument]) * (2 if argument in twice else 1)
    if given.get("normed") is not None:
        moved += bytes_of(given["normed"].y)
    weight = given.get("weight")
    if weight is None:
        return 0.0, moved
    by_input = given.get("total") is not None or given.get("sums") is not None or given.get("masked") is not None
    products = (by_input + (given.get("dweight") is not None)) if "grad" in given else 1
    n_images, _, n_positions = given["x"].shape
    return 2.0 * products * n_images * n_positions * weight.numel(), moved


@contextlib.contextmanager
def recorded(kernels: Kernels) -> Iterator[dict[str, Row]]:
    """Inside, the passes of this provider's class show in a profile as `PASS` + name, and their costs are added up."""
    rows: dict[str, Row] = {}
    kind = type(kernels)
    names = [name for name in dir(Kernels) if not name.startswith("_") and callable(getattr(Kernels, name))]
    passes = [name for name in names if name != "supports" and not name.startswith("fuses_") and hasattr(kind, name)]
    own = {name: vars(kind).get(name) for name in passes}
    depth = 0

    def recording(name: str) -> Callable[..., Any]:
        function = getattr(kind, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:  # a pass made of passes is one
                return function(*args, **kwargs)
            operations, moved = cost(name, signature.bind(*args, **kwargs).arguments)
            row = rows.setdefault(name, Row(name))
            row.operations += operations
            row.moved += moved
            depth += 1
            try:
                with record_function(PASS + name):
                    return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    for name in passes:
        setattr(kind, name, recording(name))
    try:
        yield rows
    finally:
        for name, function in own.items():
            delattr(kind, name)
            if function is not None:
                setattr(kind, name, function)


def inside(event: Any, names: tuple[str, ...]) -> bool:
    """Whether an event lies in another one that is counted as a whole."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(names):
            return True
        parent = parent.cpu_parent
    return False


def where(step: Callable[[], object], repeats: int = 3) -> list[Row]:
    """The rows of one step, means over `repeats`; the last two are torch's other operations and what is left."""
    optimizer = Row("optimizer")

    def count(of: torch.optim.Optimizer, *_: object) -> None:
        used = (p for group in of.param_groups for p in group["params"] if p.grad is not None)
        optimizer.moved += 5.0 * sum(map(bytes_of, used))

    with recorded(select(torch.zeros(1, 1, 1))) as passes, contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(count).remove)
        step()
        for row in (*passes.values(), optimizer):
            row.operations = row.moved = 0.0
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            elapsed = time.perf_counter() - start
    whole = (PASS, "Optimizer.step", *CONVOLUTIONS)
    rows = {**passes, optimizer.name: optimizer}
    others = Row("other operations of torch")
    outputs: dict[torch.Size, torch.Size] = {}
    pending: dict[str, list[tuple[torch.Size, torch.Size]]] = defaultdict(list)
    for event in found.events() or ():
        if inside(event, whole):
            continue
        name = event.name.removeprefix(PASS)
        if event.name.startswith(whole):
            label = CONVOLUTIONS.get(name, optimizer.name if name.startswith("Optimizer") else name)
            row = rows.setdefault(label, Row(label))
            row.calls += 1
            row.seconds += event.cpu_time_total * 1e-6
            if name == "aten::convolution_backward":
                grad, image, weight = map(torch.Size, event.input_shapes[:3])
                outputs[weight] = grad
                pending[label].append((image, weight))
            elif name == "aten::convolution":
                image, weight = map(torch.Size, event.input_shapes[:2])
                pending[label].append((image, weight))
        elif event.name.startswith("aten::"):  # not the nodes of autograd, which run Python
            others.calls += 1
            others.seconds += event.self_cpu_time_total * 1e-6
    for label, convolutions in pending.items():  # one product each way: an image needs no gradient
        for shape, weight in convolutions:
            _, _, *positions = shape if weight[2:].numel() == 1 else outputs[weight]  # 1x1: the positions stay
            size = shape[0] * torch.Size(positions).numel()
            rows[label].operations += 2.0 * size * weight.numel()
            rows[label].moved += 4.0 * (shape.numel() + size * weight[0])
    python = Row("Python and autograd", 0.0, elapsed - others.seconds - sum(row.seconds for row in rows.values()))
    found_rows = sorted(rows.values(), key=lambda row: -row.seconds)
    for row in (*found_rows, others, python):
        for field in ("calls", "seconds", "operations", "moved"):
            setattr(row, field, getattr(row, field) / repeats)
    return [*found_rows, others, python]


def best(call: Callable[[], object], repeats: int = 20) -> float:
    """The least seconds of several calls: a rate that the machine did reach."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def rates() -> tuple[dict[str, float], float]:
    """Operations per second of each product, and bytes per second of a copy."""
    a = torch.randn(2048, 2048)
    found = {"mm": 2.0 * 2048**3 / best(lambda: a @ a)}
    x = torch.randn(16, 256, 56, 56).contiguous(memory_format=torch.channels_last)
    for size in (1, 3):
        weight = torch.randn(256, 256, size, size).contiguous(memory_format=torch.channels_last)
        operations = 2.0 * x.numel() * 256 * size**2
        found[f"{size}x{size} convolution"] = operations / best(
            lambda weight=weight, size=size: F.conv2d(x, weight, padding=size // 2)
        )
    source = torch.zeros(1 << 25)
    copy = torch.empty_like(source)
    return found, 2.0 * bytes_of(source) / best(lambda: copy.copy_(source))


def table(rows: list[Row], rate: float, speed: float) -> str:
    lines = [
        "| work | calls | ms | GFLOP | MiB | floor ms | ms / floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    total = Row("sum")
    floors = 0.0
    for row in rows:
        floor = row.floor(rate, speed)
        floors += floor
        for field in ("seconds", "operations", "moved"):
            setattr(total, field, getattr(total, field) + getattr(row, field))
        lines.append(line(row, floor))
    return "\n".join([*lines, line(total, floors)])


def line(row: Row, floor: float) -> str:
    calls = f"{row.calls:.0f}" if row.calls else ""
    work = (f"{row.operations / 1e9:.1f}", f"{row.moved / 2**20:.0f}") if floor else ("", "")
    against = (f"{floor * 1e3:.1f}", f"{row.seconds / floor:.1f}") if floor else ("", "")
    return f"| {' | '.join([row.name, calls, f'{row.seconds * 1e3:.1f}', *work, *against])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(STEPS))
    if unknown:
        parser.exit(2, f"error: no case {unknown[0]!r}; expected one of {', '.join(STEPS)}\n")
    products, speed = rates()
    rate = max(products.values())
    measured = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in products.items())
    print(f"GFLOP/s: {measured}; a copy {speed / 1e9:.1f} GB/s; {torch.get_num_threads()} threads, float32")
    for name in args.cases or STEPS:
        step = STEPS[name]()
        step()
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        rows = where(step)
        print(f"\n{name}: a step {statistics.median(times) * 1e3:.0f} ms\n\n{table(rows, rate, speed)}", flush=True)


if __name__ == "__main__":
    main()
