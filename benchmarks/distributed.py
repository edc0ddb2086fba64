"""Sequence parallel training: peak memory per rank against one process, and how far the results differ.

    python benchmarks/distributed.py [--case layer|model] [--length N] [--features H] [--ranks 1 2 4] [--level LEVEL]

Every rank is a fresh process. It imports, warms up on a tiny step (threads, code that is loaded on first use, gloo's
connections), and takes its base; model, inputs, forward and backward all count from there. Two runs each: one for the
high-water of the process (malloc gives large blocks back when they are freed, so its holes do not count), one for the
exact peak of torch's allocator. No rank ever holds the whole input. Times are not taken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lowtide.distributed import reduce_gradients, sequence_parallel
from lowtide.measure import measure
from lowtide.measure.child import HighWater
from lowtide.models import SequenceModel
from lowtide.nn import SGConv

MIB = 2**20
BLOCKS = 16  # the input is made in blocks, each from its own seed, so that a rank makes its own alone
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def positions(L: int, H: int, rank: int, ranks: int) -> Tensor:
    """(1, H, L / ranks): this rank's positions of the input."""
    width, mine = L // BLOCKS, BLOCKS // ranks
    x = torch.empty(1, H, width * mine)
    for i in range(mine):
        generator = torch.Generator().manual_seed(rank * mine + i)
        x[..., i * width : (i + 1) * width] = torch.randn(1, H, width, generator=generator)
    return x


def build(case: str, L: int, H: int, level: Any, split: bool) -> nn.Module:
    torch.manual_seed(0)
    if case == "layer":
        model: nn.Module = SGConv(H, L, kernel_dim=32, bidirectional=True, postact="glu", recompute=level)
    else:
        model = SequenceModel(
            8, 10, H, 4, L, kernel_dim=32, bidirectional=True, postact="glu", pool="mean", recompute=level
        )
    return sequence_parallel(model) if split else model


def step(case: str, L: int, H: int, level: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """One training step: the output (this rank's part of it) and every gradient."""
    model = build(case, L, H, level, ranks > 1)
    if case == "layer":
        x = positions(L, H, rank, ranks).requires_grad_()
        y = model(x)
        y.backward(torch.ones_like(y) / L)
    else:
        x = positions(L, 8, rank, ranks).transpose(1, 2).contiguous().requires_grad_()
        y = model(x)
        torch.nn.functional.cross_entropy(y, torch.tensor([3])).backward()
    if ranks > 1:
        reduce_gradients(model)
    assert x.grad is not None
    found = {"part x.grad": x.grad, "part y" if case == "layer" else "y": y.detach()}
    return found | {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}


def be_a_rank(args: argparse.Namespace) -> None:
    folder, rank, ranks = Path(args.folder), args.rank, args.of
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    step(args.case, 4096, 8, args.level, rank, ranks)
    run: Callable[[], dict[str, Tensor]] = lambda: step(args.case, args.length, args.features, args.level, rank, ranks)  # noqa: E731
    if args.part == "high-water":
        high_water = HighWater()
        found = run()
        answer = {"bytes": high_water.over_base(), "found": found}
    else:
        answer = {"bytes": measure(lambda: bool(run()), repeats=1, device="cpu").peak_bytes}
    torch.save(answer, folder / f"{rank}.pt")
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def launch(args: argparse.Namespace, part: str, ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, __file__, "--case", args.case, "--length", str(args.length), "--level", args.level,
            "--features", str(args.features), "--part", part, "--folder", folder, "--of", str(ranks),
        ]  # fmt: skip
        environment = os.environ | MAPPED | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(ranks)]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    raise SystemExit("a rank failed; its traceback is above")
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks)]


def largest_difference(ranks: list[dict[str, Tensor]], whole: dict[str, Tensor], time_dim: int) -> tuple[float, str]:
    """||ranks - whole|| / ||whole|| of the tensor where it is largest (a gradient that is zero: of the largest one)."""
    scale = max(float(value.double().norm()) for name, value in whole.items() if name.endswith(".grad"))
    worst = (0.0, "")
    for name, value in whole.items():
        got = torch.cat([rank[name] for rank in ranks], time_dim) if name.startswith("part ") else ranks[0][name]
        size = float(value.double().norm())
        error = float((got.double() - value.double()).norm()) / (size if size > 1e-4 * scale else scale)
        worst = max(worst, (error, name))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("layer", "model"), default="layer")
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--level", default="pointwise")
    for hidden in ("--part", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--of"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_a_rank(args)
        return
    unit = args.length * args.features * 4
    print(f"{args.case}, (1, {args.features}, {args.length}), {args.level}; U = {unit / MIB:.0f} MiB")
    print("ranks  allocated peak      x P / single  process high-water  x P / single  differs by")
    whole: dict[str, Tensor] = {}
    single: dict[str, int] = {}
    for ranks in sorted({1, *args.ranks}):
        line = f"{ranks:5d}"
        for part in ("allocated", "high-water"):
            answers = launch(args, part, ranks)
            peak = max(answer["bytes"] for answer in answers)
            single.setdefault(part, peak)
            line += f"  {peak / MIB:7.1f} MiB {peak / unit * ranks:5.2f} U  {peak * ranks / single[part]:10.3f}"
        found = [answer["found"] for answer in answers]
        whole = whole or found[0]
        error, name = largest_difference(found, whole, 1 if args.case == "model" else 2)
        print(f"{line}  {error:.1e} {name}", flush=True)


if __name__ == "__main__":
    main()
