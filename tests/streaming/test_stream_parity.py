"""Both twins against sums written out: every form, every block size, longer than all the taps."""

from __future__ import annotations

import itertools

import pytest
import torch
from stream_cases import SHAPES, block_sizes, by_transform, direct, make_weights, relative_error, stream

from lowtide.lean import streaming as lean
from lowtide.lean.stream_cells import cell_plan, coefficients, kernel_of, weighted_numbers
from lowtide.reference import streaming as plain
from lowtide.sgconv_form import KernelForm

GEOMETRIES = [(1, 5, 0), (2, 4, 1), (5, 1, 2), (8, 4, 0), (1, 1, 0), (32, 6, 0), (3, 7, 2)]


def every_form(geometries=GEOMETRIES, decays=("scale",)):
    for (d, S, s0), combine, (interpolation, alignment), decay in itertools.product(
        geometries, ("cat", "sum"), SHAPES, decays
    ):
        yield KernelForm(d, S, s0, combine, interpolation, alignment, decay)


@pytest.mark.parametrize("outputs", ["one", "two", "two-sided"])
def test_cells_describe_the_kernel_tap_by_tap(outputs):
    C, bidirectional = {"one": (1, False), "two": (2, False), "two-sided": (1, True)}[outputs]
    for form in every_form():
        weights = make_weights(form, C, bidirectional=bidirectional)
        plan = cell_plan(form, C, bidirectional)
        v = weighted_numbers(weights.pieces, weights.multiplier, weights.norm, weights.skip, bidirectional)
        want, reverse = weights.kernels()
        if reverse is not None:
            want = torch.cat([reverse.flip(-1), want], -1)
        assert relative_error(kernel_of(plan, coefficients(plan, v)), want) < 1e-14, form
        assert plan.state_numbers(C) <= 1.05 * plan.taps, form


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("decay", ["scale", "power"])
def test_the_plain_twin_is_a_dot_product(decay, bidirectional):
    weights = make_weights(KernelForm(4, 4, decay=decay), C=2, bidirectional=bidirectional)
    tensors, options = weights.arguments()
    filter = plain.prepare(*tensors, **options)
    u = torch.randn(2, 3, 90, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ahead = torch.cat([u, u.new_zeros(2, 3, filter.delay)], -1)
    got = plain.block(ahead, plain.initial_state(filter, 2), filter)[..., filter.delay :]
    assert relative_error(got, direct(u, weights)) < 1e-13


@pytest.mark.parametrize("sizes", ["1", "7", "1000", "random"])
def test_every_form_streams(provider, sizes):
    """Longer than all the taps, so that rings and delay lines come round."""
    short = [(1, 5, 0), (2, 4, 1), (5, 1, 2), (8, 4, 0), (1, 1, 0)]
    for form in every_form(short, ("scale", "power")):
        C, bidirectional = (1, True) if form.combine == "sum" else (2, False)
        weights = make_weights(form, C, bidirectional=bidirectional)
        tensors, options = weights.arguments()
        filter = lean.prepare(*tensors, **options)
        L = 2 * filter.taps + 37
        u = torch.randn(1, 3, L, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ahead = torch.cat([u, u.new_zeros(1, 3, filter.delay)], -1)
        got = stream(lean, ahead, lean.initial_state(filter, 1), filter, block_sizes(sizes, ahead.shape[-1]))
        assert relative_error(got[..., filter.delay :], direct(u, weights)) < 1e-12, form


BLOCKS = ["1", "2", "3", "7", "64", "1000", "random"]


@pytest.mark.parametrize("L", [5, 1000, 3000])
@pytest.mark.parametrize("sizes", BLOCKS)
@pytest.mark.parametrize(
    ("decay", "dtype"), [("scale", torch.float64), ("scale", torch.float32), ("power", torch.float32)]
)
def test_blocks_equal_the_whole(provider, sizes, decay, dtype, L):
    """H = 21: whole vector registers, part of one, and single channels. 1,024 taps, up to 3,000 samples."""
    weights = make_weights(KernelForm(32, 6, decay=decay), C=1, H=21)
    tensors, options = weights.arguments(dtype)
    filter = lean.prepare(*tensors, **options)
    u = torch.randn(2, 21, L, generator=torch.Generator().manual_seed(1)).to(dtype)
    state = lean.initial_state(filter, 2)
    got = stream(lean, u, state, filter, block_sizes(sizes, L))
    want = by_transform(u, weights)
    if dtype == torch.float64:
        assert relative_error(got, want) < 1e-12
    else:
        assert relative_error(got, want) <= 2 * plain_error(u, weights, want) + 4 * torch.finfo(dtype).eps
    assert int(state["position"]) == L


def plain_error(u, weights, want) -> float:
    """Error of the plain twin in u's dtype over the last 50 samples: each costs all the taps."""
    tensors, options = weights.arguments(u.dtype)
    filter = plain.prepare(*tensors, **options)
    state = plain.initial_state(filter, u.shape[0])
    past = u[..., :-50]
    K = filter.kernel.shape[-1]
    heard = torch.nn.functional.pad(past, (K, 0))[..., -K:]
    state["ring"][:] = heard.permute(2, 0, 1)
    return relative_error(plain.block(u[..., -50:], state, filter), want[..., -50:])


def test_a_long_kernel_and_a_longer_sequence(provider):
    """32,768 taps, 70,000 samples: blocks of 1000 and single steps; also as one block from the start."""
    weights = make_weights(KernelForm(32, 11), H=1)
    tensors, options = weights.arguments()
    filter = lean.prepare(*tensors, **options)
    u = torch.randn(1, 1, 70_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = by_transform(u, weights)
    for sizes in (block_sizes("1000+1", 70_000), [70_000], [69_000, *[1] * 1000], [1, 40_000, 63, 29_936]):
        got = stream(lean, u, lean.initial_state(filter, 1), filter, sizes)
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("decay", ["scale", "power"])
def test_prompt_then_steps_then_blocks(provider, decay):
    weights = make_weights(KernelForm(32, 6, decay=decay), H=2)
    tensors, options = weights.arguments()
    filter = lean.prepare(*tensors, **options)
    u = torch.randn(1, 2, 4096 + 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = by_transform(u, weights)
    for prompt in (0, 1, 63, 64, 65, 4096):
        state = lean.initial_state(filter, 1)
        first = lean.block(u[..., :prompt], state, filter)
        assert first.shape == (1, 1, 2, prompt)
        steps = [lean.step(u[..., t], state, filter) for t in range(prompt, prompt + 70)]
        rest = lean.block(u[..., prompt + 70 : prompt + 130], state, filter)
        got = torch.cat([first, torch.stack(steps, -1), rest], -1)
        assert relative_error(got, want[..., : prompt + 130]) < 1e-12
        assert int(state["position"]) == prompt + 130
