"""Ten million samples: the error at the end is the error at the start."""

from __future__ import annotations

import pytest
import torch
from stream_cases import by_transform, make_weights, relative_error

from lowtide.lean import streaming as lean
from lowtide.sgconv_form import KernelForm


@pytest.mark.parametrize(
    ("provider_name", "decay", "samples"),
    [("native", "scale", 10_000_000), ("tensor", "scale", 300_000), ("tensor", "power", 1_000_000)],
)
@pytest.mark.parametrize("signal", ["noise", "one"])
def test_the_error_does_not_grow(monkeypatch, provider_name, decay, samples, signal):
    """Blocks of 1000 samples with one single step between; two windows of 20 blocks are held against float64."""
    monkeypatch.setenv("LOWTIDE_KERNELS", provider_name)
    H = 4
    weights = make_weights(KernelForm(16, 6, decay=decay), H=H)  # 512 taps
    tensors, options = weights.arguments(torch.float32)
    filter = lean.prepare(*tensors, **options)
    assert filter.taps == 512
    state = lean.initial_state(filter, 1)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(997 * 1001, 1, H, generator=generator)
    u = noise if signal == "noise" else torch.ones_like(noise)

    def run(begin: int, end: int, kept: list | None = None) -> None:
        """Rounds begin..end-1 of 1001 samples; the input repeats after 997 rounds."""
        for index in range(begin, end):
            start = index % 997 * 1001
            block = lean.block_rows(u[start : start + 1000], state, filter)
            single = lean.block_rows(u[start + 1000 : start + 1001], state, filter)
            if kept is not None:
                kept += [block, single]

    def error(begin: int) -> float:
        kept: list = []
        run(begin, begin + 20, kept)
        first = begin % 997 * 1001
        assert 512 <= first <= 977 * 1001
        want = by_transform(u[first - 512 : first + 20 * 1001].permute(1, 2, 0), weights)[..., 512:]
        return relative_error(torch.cat(kept).permute(1, 2, 3, 0), want)

    last = samples // 1001
    while not 1 <= last % 997 <= 970:  # so that the window lies in one piece of the noise
        last += 1
    run(0, 1)
    early = error(1)
    run(21, last)
    late = error(last)
    assert int(state["position"]) == (last + 20) * 1001
    assert early < 1e-6
    assert late < 1.5 * early, (early, late)
