"""Long convolutions against plain rfft autograd: forward and backward of `long_conv` and of a whole two-sided layer.

Memory in the table is over the process's base, where u, k and dy (the layer: x) exist already; the lines below it give
it in units of the input. One unit of it is the output, one the input's gradient, and for a batch of one dk.
"""

from __future__ import annotations

from collections.abc import Callable

import peers
import torch
from harness import MIB, Contender, Figure, console, device, run_case

from lowtide.functional import long_conv
from lowtide.nn import SGConv

CONVOLUTIONS = {"conv4k": (16, 128, 4096), "conv64k": (4, 64, 65536), "conv1m": (1, 64, 1048576)}
LAYER = (1, 128, 524288)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def convolution(shape: tuple[int, int, int], level: str = "none") -> Callable[[], None]:
    B, H, L = shape
    u, dy = noise(B, H, L).requires_grad_(), noise(B, H, L, seed=1)
    k = (noise(H, L, seed=2) / L**0.5).requires_grad_()

    def step() -> None:
        u.grad = k.grad = None
        long_conv(u, k, recompute=level).backward(dy)

    return step


def layer(shape: tuple[int, int, int], level: str = "none") -> Callable[[], None]:
    B, H, L = shape
    torch.manual_seed(0)
    model = SGConv(H, L, kernel_dim=32, bidirectional=True, recompute=level).to(device())
    x = noise(B, H, L).requires_grad_()

    def step() -> None:
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))

    return step


def contenders(builder: str, shape: tuple[int, int, int], levels: tuple[str, ...]) -> list[Contender]:
    plain = Contender("plain rfft autograd", f"sgconv:{builder}", {"shape": shape}, baseline=True)
    ours = [Contender(f"lowtide {level}", f"sgconv:{builder}", {"shape": shape, "level": level}) for level in levels]
    return [plain, *(peers.contenders(shape) if builder == "convolution" else []), *ours]


def run(*, quick: bool = False, only: str = "") -> list[Figure]:
    figures: list[Figure] = []
    cases = {name: ("convolution", shape, ("layer",)) for name, shape in CONVOLUTIONS.items()}
    cases["layer"] = ("layer", LAYER, ("pointwise", "layer"))
    for name, (builder, shape, levels) in cases.items():
        if only not in ("", name):
            continue
        B, H, L = shape
        small = B * H * L < 2**24
        title = f"{'long_conv' if builder == 'convolution' else 'two-sided layer'} ({B}, {H}, {L})"
        repeats = 1 if quick else (9 if small else 3)
        found = run_case(title, contenders(builder, shape, levels), repeats=repeats, steps=5 if small else 2)
        unit = B * H * L * 4
        peaks = ", ".join(f"{f.contender} {f.peak_bytes / unit:.2f}" for f in found if not f.note)
        console.print(f"peak in units of the input ({unit / MIB:.0f} MiB): {peaks}\n")
        figures += found
    return figures
