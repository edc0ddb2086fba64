"""The state as a value: saved in mid-block, copied, rewound, rows started anew, other weights, the wrong state."""

from __future__ import annotations

import io

import pytest
import torch
from stream_cases import by_transform, make_weights, relative_error, stream

from lowtide.errors import ArgumentError
from lowtide.lean import streaming as lean
from lowtide.sgconv_form import KernelForm
from lowtide.stream_state import clone_state, map_state, reset_rows

FORMS = {
    "cells": KernelForm(8, 6),
    "two outputs": KernelForm(8, 6, combine="sum", interpolation="nearest"),
    "partitions": KernelForm(16, 5, decay="power"),
}


@pytest.fixture(params=FORMS)
def case(request):
    weights = make_weights(FORMS[request.param], C=2 if request.param == "two outputs" else 1, H=5)
    tensors, options = weights.arguments()
    u = torch.randn(3, 5, 900, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return weights, lean.prepare(*tensors, **options), u


def test_saved_in_mid_block_and_loaded(provider, case):
    weights, filter, u = case
    state = lean.initial_state(filter, 3)
    first = stream(lean, u[..., :333], state, filter, [64] * 5 + [13])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    tensors, options = weights.arguments()
    again = lean.prepare(*tensors, **options)  # as another process would
    rest = stream(lean, u[..., 333:], loaded, again, [51] + [64] * 8 + [4])
    assert relative_error(torch.cat([first, rest], -1), by_transform(u, weights)) < 1e-12


def test_a_clone_rewinds(provider, case):
    weights, filter, u = case
    state = lean.initial_state(filter, 3)
    lean.block(u[..., :400], state, filter)
    kept = clone_state(state)
    other = lean.block(torch.flip(u[..., 400:], (-1,)), state, filter)
    got = lean.block(u[..., 400:], kept, filter)
    want = by_transform(u, weights)[..., 400:]
    assert relative_error(other, want) > 0.1  # the original went elsewhere
    assert relative_error(got, want) < 1e-12


def test_rows_start_at_different_times(provider, case):
    weights, filter, u = case
    state = lean.initial_state(filter, 3)
    lean.block(u[..., :300], state, filter)
    assert reset_rows(state, torch.tensor([False, True, False])) is state
    middle = lean.block(u[..., 300:550], state, filter)
    reset_rows(state, torch.tensor([True, False, False]))
    got = torch.cat([lean.step(u[..., t], state, filter).unsqueeze(-1) for t in range(550, 600)], -1)
    got = torch.cat([got, lean.block(u[..., 600:], state, filter)], -1)
    for row, start in ((0, 550), (1, 300), (2, 0)):
        alone = by_transform(u[row : row + 1, :, start:], weights)[..., 550 - start :]
        assert relative_error(got[row : row + 1], alone) < 1e-12
    assert relative_error(middle[1:2], by_transform(u[1:2, :, 300:], weights)[..., :250]) < 1e-12


def test_other_weights_in_the_middle(provider, case):
    """From then on every output is the present kernel's over the whole window, the past included."""
    weights, filter, u = case
    state = lean.initial_state(filter, 3)
    lean.block(u[..., :500], state, filter)
    for piece in weights.pieces:
        piece *= torch.linspace(-1, 2, piece.shape[-1])
    tensors, options = weights.arguments()
    changed = lean.prepare(*tensors, **options)
    assert changed.fingerprint != filter.fingerprint
    step = lean.step(u[..., 500], state, changed).unsqueeze(-1)
    got = torch.cat([step, lean.block(u[..., 501:], state, changed)], -1)
    assert relative_error(got, by_transform(u, weights)[..., 500:]) < 1e-12


def test_the_state_is_only_tensors_and_stays_in_place(provider, case):
    _, filter, u = case
    state = lean.initial_state(filter, 3)
    addresses = {name: leaf.data_ptr() for name, leaf in state.items()}
    lean.block(u[..., :777], state, filter)
    lean.step(u[..., 777], state, filter)
    assert {name: leaf.data_ptr() for name, leaf in state.items()} == addresses
    moved = map_state(lambda leaf: leaf.to("meta"), {"layers": [state, (state,)]})
    assert moved["layers"][1][0]["ring"].device.type == "meta"


def test_size_of_the_state():
    """Counted in the tensors: at most 1.05 numbers per tap and channel, whatever the form."""
    for combine in ("cat", "sum"):
        for interpolation in ("linear", "nearest"):
            for d, S, s0 in ((1, 12, 0), (2, 12, 0), (1, 13, 0), (32, 6, 0), (64, 8, 1), (32, 11, 0), (1, 1, 0)):
                for C in (1, 2):
                    form = KernelForm(d, S, s0, combine, interpolation)
                    tensors, options = make_weights(form, C=C, H=2).arguments(torch.float32)
                    state = lean.initial_state(lean.prepare(*tensors, **options), 1)
                    numbers = sum(leaf.numel() for leaf in state.values() if leaf.dim())
                    assert form.taps * 2 <= numbers <= 1.05 * form.taps * 2, form


def test_size_of_the_state_of_partitions():
    """At most 1.5 numbers per tap and channel, and 192 more."""
    for taps in (1, 63, 64, 65, 100, 128, 129, 1000, 1023, 1024, 4096, 5000, 65_537, 2**17):
        filter = lean.prepare_taps(torch.ones(1, 1, taps))
        numbers = sum(leaf.numel() for leaf in lean.initial_state(filter, 1).values() if leaf.dim())
        assert taps <= numbers <= 1.5 * taps + 192, taps


@pytest.mark.parametrize("taps", [4096, 5000, 32_768])
def test_the_dearest_token_of_partitions(monkeypatch, taps):
    """Every n_max samples transforms of at most 4 K numbers per channel, every 64 samples fewer, none at the others."""
    filter = lean.prepare_taps(torch.randn(1, 1, taps, generator=torch.Generator().manual_seed(0)))
    state = lean.initial_state(filter, 1)
    transformed = 0
    forward, backward = torch.fft.rfft, torch.fft.irfft

    def count(transform):
        def counted(x, n=None, **options):
            nonlocal transformed
            transformed += x.shape[-1] if n is None else n
            return transform(x, n=n, **options)

        return counted

    monkeypatch.setattr(torch.fft, "rfft", count(forward))
    monkeypatch.setattr(torch.fft, "irfft", count(backward))
    longest, costs = taps // 8, []
    longest = 64 * 2 ** ((longest // 64).bit_length() - 1)
    for _ in range(2 * longest):
        transformed = 0
        lean.step(torch.ones(1, 1), state, filter)
        costs.append(transformed)
    dearest = [index + 1 for index, cost in enumerate(costs) if cost == max(costs)]
    assert dearest == [longest, 2 * longest]
    assert taps < max(costs) <= 4 * taps
    assert all((cost > 0) == ((index + 1) % 64 == 0) for index, cost in enumerate(costs))
    assert sum(costs) / len(costs) < 64 * (taps.bit_length() - 6)


@pytest.mark.parametrize("change", ["batch", "dtype", "another filter", "strided", "position"])
def test_the_wrong_state_is_refused(provider, case, change):
    _, filter, u = case
    state = lean.initial_state(filter, 3)
    if change == "batch":
        u = u[:2]
    elif change == "dtype":
        state = map_state(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, state)
    elif change == "another filter":
        tensors, options = make_weights(KernelForm(8, 5), H=5).arguments()
        state = lean.initial_state(lean.prepare(*tensors, **options), 3)
    elif change == "position":
        state["position"] = state["position"].int()
    else:
        state = map_state(lambda leaf: leaf.repeat_interleave(2, -1)[..., ::2] if leaf.dim() else leaf, state)
    with pytest.raises(ArgumentError, match=r"expected a (contiguous )?(state|position)"):
        lean.block(u[..., :4], state, filter)


def test_reset_rows_refuses_a_mask_of_another_length(case):
    _, filter, u = case
    state = lean.initial_state(filter, 3)
    lean.block(u[..., :50], state, filter)
    before = clone_state(state)
    with pytest.raises(ArgumentError, match="a bool mask"):
        reset_rows(state, torch.tensor([True, False]))
    with pytest.raises(ArgumentError, match="a bool mask"):
        reset_rows(state, torch.tensor([1, 0, 0]))
    assert all(torch.equal(before[name], state[name]) for name in state)
