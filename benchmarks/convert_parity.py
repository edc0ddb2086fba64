"""Converted networks against their originals: every DenseNet of torchvision, timm and MONAI, at every level.

    python benchmarks/convert_parity.py [NETWORK ...] [--out results/convert-parity.csv]

Pictures are 64x64 and lines 256 (batch 2), volumes 32^3 (batch 8: the last block has one position there, and norms of
two or four values make the original itself chaotic). Per network: `lowtide.verify` at each level
(training, eval, hooks); weights to the original and back; torch.export and torch.jit.trace in eval; six AdamW steps,
converted before the third and restored before the fifth. One row per network is added to the file; networks in it are
not run again.
"""

from __future__ import annotations

import argparse
import copy
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.levels import LEVELS
from lowtide.models.resolve import resolve_model

SIZES = {"1d": (2, 1, 256), "2d": (2, 1, 64, 64), "3d": (8, 1, 32, 32, 32)}
DEPTHS = {"torchvision": (121, 161, 169, 201), "timm": (121, 161, 169, 201), "monai": (121, 169, 201, 264)}
NETWORKS = [
    *(f"{package}:densenet{depth}" for package in ("torchvision", "timm") for depth in DEPTHS[package]),
    "timm:densenet264d",
    "timm:densenetblur121d",
    *(f"monai:densenet{depth}-{dims}" for dims in SIZES for depth in DEPTHS["monai"]),
]


def image(name: str) -> Tensor:
    shape = SIZES[name[-2:]] if name.startswith("monai:") else (2, 3, 64, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def build(name: str) -> Any:
    torch.manual_seed(0)
    model, _ = resolve_model(name)
    assert isinstance(model, nn.Module)
    return model


def parity(name: str) -> Iterator[tuple[str, str]]:
    """Level -> worst error over allowed error of all comparisons, or the verdict where one failed."""
    plain, converted = build(name), build(name)
    report = lowtide.convert(converted)
    yield "converted", str(len(report.converted))
    yield "left", "; ".join(f"{path}: {reason}" for path, reason in report.skipped)
    for level in LEVELS:
        converted.set_recompute(level)
        found = lowtide.verify(plain, converted, image(name), steps=2)
        worst = max((row.error / row.allowed for row in found.rows if row.allowed), default=0.0)
        yield level, f"{worst:.1e}" if found.ok else found.verdict()


def weights(name: str) -> str:
    """Whether a state dict goes to the converted model and back without a change."""
    plain, converted, back = build(name), build(name), build(name)
    lowtide.convert(converted)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    converted.load_state_dict(plain.state_dict())
    back.load_state_dict(converted.state_dict())
    pairs = zip(plain.state_dict().items(), back.state_dict().items(), strict=True)
    return "yes" if all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs) else "NO"


def recorded(name: str) -> Iterator[tuple[str, str]]:
    """Largest difference of a converted model's export and trace to the original in eval, over the largest output."""
    x, plain = image(name), build(name)
    plain(x)  # running statistics that are not the initial ones
    plain.eval()
    converted = copy.deepcopy(plain)
    lowtide.convert(converted, recompute="layer")
    with torch.no_grad():
        expected = plain(x)

        def error(run: Any) -> str:
            return f"{((run(x) - expected).abs().max() / expected.abs().max()).item():.1e}"

        yield "export", error(torch.export.export(converted, (x,)).module())
        yield "trace", error(torch.jit.trace(converted, x))


def curve(name: str) -> str:
    """Largest relative difference of two loss curves in float64: one untouched, one converted and restored midway."""
    curves = []
    for changes in (False, True):
        model, x = build(name).double(), image(name).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(6):
            if changes and step == 2:
                lowtide.convert(model, recompute="layer")
            if changes and step == 4:
                lowtide.restore(model)
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert max(curves[0]) > 1.01 * min(curves[0]), "a flat curve would agree whatever the gradients"
    return f"{max(abs(a - b) / abs(a) for a, b in zip(*curves, strict=True)):.1e}"


COLUMNS: tuple[str, ...] = ("network", "converted", "left", *LEVELS, "weights", "export", "trace", "curve", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="some of the names; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("results/convert-parity.csv"))
    args = parser.parse_args()
    done = set()
    if args.out.exists():
        with args.out.open() as file:
            done = {row["network"] for row in csv.DictReader(file)}
    for name in args.networks or NETWORKS:
        if name in done:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.trace's own
            row = {"network": name, "torch": torch.__version__, **dict(parity(name)), "weights": weights(name)}
            row |= {**dict(recorded(name)), "curve": curve(name)}
        new = not args.out.exists()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        print(" ".join(str(row[column]) for column in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
