"""The layer as a function of its input: against sums written out, across levels and dtypes, what it keeps, padding."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from sgconv_compare import assert_as_exact, assert_near, gradients
from sgconv_direct import direct_kernel, direct_long_conv
from torch import nn
from torch.nn import functional as F

from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.lean import sgconv_pointwise
from lowtide.levels import LEVELS
from lowtide.measure import measure
from lowtide.nn import SGConv

LEAN = ("pointwise", "layer", "block")
FORMS = [
    {},
    {"combine": "sum"},
    {"interpolation": "nearest"},
    {"combine": "sum", "interpolation": "nearest"},
    {"alignment": "align_corners"},
    {"alignment": "drop_last", "combine": "sum"},
    {"alignment": "wrap"},
    {"decay": "power", "decay_min": 0.5, "decay_max": 1.0},
    {"decay": "power_fixed", "decay_min": 1.0, "decay_max": 1.0, "combine": "sum"},
    {"init": "cos", "decay_min": 1.0, "decay_max": 3.0},
]


def make(H: int = 6, l_max: int = 64, seed: int = 0, **arguments) -> SGConv:
    torch.manual_seed(seed)
    return SGConv(H, l_max, **{"kernel_dim": 4, **arguments})


def noise(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of the pointwise part even for small tensors."""
    monkeypatch.setattr(sgconv_pointwise, "TILE_BYTES", 2000)


def written_out(layer: SGConv, u: torch.Tensor) -> torch.Tensor:
    """The layer in eval mode by sums over t and lag, in float64."""
    form = layer.form
    C = form.channels
    u_BHL = u if form.transposed else u.transpose(1, 2)
    kernel = direct_kernel(list(layer.kernel_list), layer.multiplier, layer.decay, form.kernel) / layer.kernel_norm
    reverse = kernel[C:] if form.bidirectional else None
    y = direct_long_conv(u_BHL, kernel[:C], layer.D, reverse)
    y = y.reshape(y.shape[0], -1, y.shape[-1])
    if form.linear:
        return y if form.transposed else y.transpose(1, 2)
    y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
    assert layer.output_linear is not None
    y = torch.einsum("oi,bit->bot", layer.output_linear.weight, y) + layer.output_linear.bias[:, None]
    if form.postact == "glu":
        a, b = y.chunk(2, 1)
        y = a / (1 + torch.exp(-b))
    return y if form.transposed else y.transpose(1, 2)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_form_equals_the_sum_written_out(small_tiles, form, bidirectional, channels, transposed):
    layer = make(bidirectional=bidirectional, channels=channels, transposed=transposed, **form).double()
    u = noise(2, 6, 40) if transposed else noise(2, 40, 6)
    u.requires_grad_()
    inputs = [u, *layer.parameters()]
    want = written_out(layer, u)
    expected = gradients(want, inputs)
    for level in LEVELS:
        layer.set_recompute(level)
        got = layer(u)
        assert_near(got, want, 1e-12, level)
        for a, b in zip(gradients(got, inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("arguments", [{}, {"bidirectional": True, "channels": 2}], ids=str)
def test_every_form_equals_the_sum_written_out_at_1024(form, arguments):
    layer = make(H=8, l_max=1024, kernel_dim=32, **arguments, **form).double()
    u = noise(2, 8, 1024)
    with torch.no_grad():
        want = written_out(layer, u)
        for level in LEVELS:
            layer.set_recompute(level)
            assert_near(layer(u), want, 1e-12, level)


def test_a_large_layer_equals_the_sum_written_out():
    layer = make(H=8, l_max=1024, kernel_dim=32, bidirectional=True, postact="glu", channels=2)
    u = noise(2, 8, 1024).float()
    want = written_out(copy.deepcopy(layer).double(), u.double())
    assert_near(layer(u), want, 1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dropout": 0.3},
        {"dropout": 0.3, "transposed": False, "postact": "glu"},
        {"dropout": 0.3, "transposed": False, "tie_dropout": True},
        {"dropout": 0.3, "norm": True, "activation": "silu", "channels": 2, "postact": "glu"},
        {"norm": True, "transposed": False, "activation": "relu"},
        {"activation": "tanh"},
        {"activation": "sigmoid"},
        {"activation": "identity"},
        {"linear": True, "channels": 2, "bidirectional": True},
        {"linear": True, "transposed": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_levels_agree_in_training_and_draw_the_same_random_numbers(small_tiles, arguments, padded):
    layer = make(**arguments).double()
    u = noise(3, 6, 50) if layer.form.transposed else noise(3, 50, 6)
    u.requires_grad_()
    lengths = torch.tensor([50, 17, 0]) if padded else None
    inputs = [u, *layer.parameters()]
    results = {}
    for level in LEVELS:
        layer.set_recompute(level)
        torch.manual_seed(3)
        y = layer(u, lengths)
        after_forward = torch.get_rng_state()
        results[level] = [y, *gradients(y, inputs)]
        assert torch.equal(torch.get_rng_state(), after_forward)
        results[level].append(torch.rand(3))
    if layer.form.drop_rate:
        torch.manual_seed(4)
        assert not torch.equal(layer(u, lengths), results["block"][0])
    for level in LEAN:
        for a, b in zip(results[level], results["none"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_dropout_zeroes_whole_channels_or_single_numbers():
    for transposed, tied, whole in ((True, False, True), (False, False, False), (False, True, True)):
        layer = make(dropout=0.5, transposed=transposed, tie_dropout=tied, recompute="none", activation="sigmoid")
        assert layer.output_linear is not None
        with torch.no_grad():
            layer.output_linear.weight.copy_(torch.eye(6))
            layer.output_linear.bias.zero_()
        y = layer(noise(4, 6, 30).float() if transposed else noise(4, 30, 6).float())
        zero = (y if transposed else y.transpose(1, 2)) == 0
        assert 0.2 < zero.float().mean() < 0.8
        assert (zero.all(-1) == zero.any(-1)).all().item() is whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEAN)
@pytest.mark.parametrize("transposed", [True, False])
def test_low_precision_is_as_exact_as_the_plain_form(dtype, level, transposed):
    start = make(H=8, l_max=500, kernel_dim=8, bidirectional=True, postact="glu", norm=True, transposed=transposed).to(
        dtype
    )
    u = (noise(3, 8, 500) if transposed else noise(3, 500, 8)).to(dtype)
    results = []
    for recompute, kind in (("none", torch.float64), ("none", dtype), (level, dtype)):
        layer = copy.deepcopy(start).to(kind)
        layer.set_recompute(recompute)
        x = u.to(kind).requires_grad_()
        y = layer(x)
        assert y.dtype == kind
        results.append([y, *gradients(y, [x, *layer.parameters()])])
    names = ["y", "u", *(name for name, _ in start.named_parameters())]
    for name, oracle, plain, ours in zip(names, *results, strict=True):
        assert_as_exact(ours, plain, oracle, name)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
def test_autocast_runs_backward_in_the_dtype_of_the_forward(low, norm):
    start = make(H=8, l_max=200, kernel_dim=8, postact="glu", norm=norm)
    u = noise(2, 8, 200).float()
    results = []
    for recompute, kind in (("none", torch.float64), ("none", torch.float32), ("layer", torch.float32)):
        layer = copy.deepcopy(start).to(kind)
        layer.set_recompute(recompute)
        x = u.to(kind).requires_grad_()
        with torch.autocast("cpu", low, enabled=kind == torch.float32):
            y = layer(x)
        results.append([y, *gradients(y, [x, *layer.parameters()])])
    oracle, plain, ours = results
    assert ours[0].dtype == plain[0].dtype == low
    for want, a, b in zip(oracle, plain, ours, strict=True):
        assert a.dtype == b.dtype
        # gradients are float32 numbers with the rounding of the low dtype in them
        allowed = 2 * (a.double() - want).norm() + 4 * torch.finfo(low).eps * want.norm()
        assert (b.double() - want).norm() <= allowed < want.norm()


class Stack(nn.Sequential):
    def __init__(self, level, n: int, channels: int = 1, **arguments):
        layers = [make(H=16, l_max=256, seed=i, recompute=level, channels=channels, **arguments) for i in range(n)]
        super().__init__(*layers)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("transposed", [True, False])
def test_kept_bytes_of_a_stack_are_one_or_two_inputs_per_layer(bidirectional, transposed):
    B, H, L = 2, 16, 256
    unit = B * H * L * 4
    u = torch.randn(B, H, L) if transposed else torch.randn(B, L, H)
    for level, per_layer in (("layer", 1), ("block", 1), ("pointwise", 2)):
        stack = Stack(level, 6, bidirectional=bidirectional, transposed=transposed)
        assert measure(stack, u, repeats=1).saved_bytes == 6 * per_layer * unit
    stack = Stack("pointwise", 1, channels=3, bidirectional=bidirectional, transposed=transposed)
    assert measure(stack, u, repeats=1).saved_bytes == (1 + 3) * unit
    assert measure(Stack("none", 6, transposed=transposed), u, repeats=1).saved_bytes > 6 * 6 * unit
    assert measure(Stack("pointwise", 1, linear=True, transposed=transposed), u, repeats=1).saved_bytes == unit


def test_with_dropout_one_random_state_or_the_channel_mask_is_kept():
    B, H, L = 2, 16, 256
    unit = B * H * L * 4
    assert measure(Stack("layer", 1, dropout=0.2), torch.randn(B, H, L), repeats=1).saved_bytes == unit + B * H
    single = Stack("layer", 1, dropout=0.2, transposed=False)
    state = torch.get_rng_state().numel()
    assert measure(single, torch.randn(B, L, H), repeats=1).saved_bytes == unit + state


def test_allocated_peak_falls_from_level_to_level():
    B, H, L = 1, 64, 16384
    unit = B * H * L * 4
    u = torch.randn(B, H, L, requires_grad=True)
    peaks = {}
    for level in ("none", "pointwise", "layer"):
        layer = make(H=H, l_max=L, kernel_dim=32, bidirectional=True, recompute=level)
        peaks[level] = measure(layer, u, repeats=1).peak_bytes / unit
    # y and its gradient, the pre-activation which becomes du; at "pointwise" both. Workspace: nine buffers of 2 MiB.
    workspace = 9 * 2 * 2**20 / unit + 1.0
    assert peaks["layer"] < peaks["pointwise"] < peaks["none"] / 2
    assert peaks["layer"] <= 3 + workspace
    assert peaks["pointwise"] <= 4 + workspace

    def inference(x):
        with torch.no_grad():
            layer(x)

    layer.set_recompute("pointwise")
    assert 1 <= measure(inference, u.detach(), repeats=1).peak_bytes / unit <= 1 + workspace - 0.5


def test_nothing_is_kept_without_grad_and_for_frozen_inputs_only_what_is_needed():
    layer = make(H=16, l_max=256)
    u = torch.randn(2, 16, 256)
    with torch.no_grad():
        assert layer(u).grad_fn is None
    frozen = copy.deepcopy(layer).requires_grad_(False)
    assert frozen(u).grad_fn is None
    u.requires_grad_()
    frozen(u).sum().backward()
    assert u.grad is not None
    assert all(p.grad is None for p in frozen.parameters())
    assert layer.output_linear is not None
    only_map = copy.deepcopy(layer).requires_grad_(False)
    assert only_map.output_linear is not None
    only_map.output_linear.weight.requires_grad_()
    for level in LEAN:
        only_map.set_recompute(level)
        only_map.zero_grad()
        only_map(u.detach()).sum().backward()
        assert only_map.output_linear.weight.grad is not None
        layer.zero_grad()
        layer(u.detach()).sum().backward()
        assert_near(only_map.output_linear.weight.grad, layer.output_linear.weight.grad, 1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("transposed", [True, False])
def test_each_padded_row_equals_the_row_alone_several_layers_deep(side, bidirectional, level, transposed):
    arguments = {"bidirectional": bidirectional, "transposed": transposed, "recompute": level, "postact": "glu"}
    layers = [make(seed=i, **arguments).double() for i in range(3)]
    time = 2 if transposed else 1
    L, lengths = 40, [40, 13, 1, 0]
    u = noise(4, 6, L) if transposed else noise(4, L, 6)
    spoilt = u.clone()
    spans = [slice(0, n) if side == "right" else slice(L - n, L) for n in lengths]
    for row, span in zip(spoilt, spans, strict=True):
        padding = torch.ones(L, dtype=torch.bool)
        padding[span] = False
        row.index_fill_(time - 1, padding.nonzero().flatten(), float("nan"))  # what padding holds does not matter
    spoilt.requires_grad_()
    y = spoilt
    for layer in layers:
        y = layer(y, torch.tensor(lengths), side)
    weights = noise(*y.shape, seed=8)
    (du,) = torch.autograd.grad(y, spoilt, weights)
    for b, span in enumerate(spans):
        index = (slice(None), slice(None), span) if transposed else (slice(None), span)
        outside = torch.ones_like(y[b : b + 1], dtype=torch.bool)
        outside[index] = False
        assert not y[b : b + 1][outside].any()
        assert not du[b : b + 1][outside].any()
        if lengths[b] == 0:
            continue
        alone = u[b : b + 1][index].clone().requires_grad_()
        single = alone
        for layer in layers:
            single = layer(single)
        assert_near(y[b : b + 1][index], single, 1e-12)
        (expected,) = torch.autograd.grad(single, alone, weights[b : b + 1][index])
        assert_near(du[b : b + 1][index], expected, 1e-11)


def test_strided_expanded_and_empty_inputs():
    layer = make().double()
    u = noise(3, 6, 20)
    strided = u.transpose(1, 2).contiguous().transpose(1, 2)
    assert_near(layer(strided), layer(u), 1e-13)
    one = u[:1].expand(3, -1, -1)
    assert_near(layer(one), layer(one.contiguous()), 1e-13)
    for level in LEVELS:
        layer.set_recompute(level)
        empty = torch.zeros(0, 6, 20, dtype=torch.float64, requires_grad=True)
        y = layer(empty)
        assert y.shape == (0, 6, 20)
        y.sum().backward()
        assert empty.grad is not None


def test_inputs_longer_than_all_the_taps_see_a_window():
    layer = make(l_max=16, kernel_dim=4).double()
    taps = layer.form.kernel.taps
    assert taps == 16
    u = noise(1, 6, 50)
    assert_near(layer(u), written_out(layer, u), 1e-12)
    earlier = u.clone()
    earlier[..., 0] += 1.0
    change = (layer(earlier) - layer(u)).abs().amax((0, 1))
    assert change[:taps].min() > 1e-9
    assert change[taps:].max() < 1e-13


def test_second_derivative_is_refused_and_supported_at_none():
    layer = make().double()
    u = noise(1, 6, 10).requires_grad_()
    with pytest.raises(UnsupportedError, match="recompute='none'") as caught:
        torch.autograd.grad(layer(u).sum(), u, create_graph=True)
    assert "\n" not in str(caught.value)
    layer.set_recompute("none")
    (du,) = torch.autograd.grad(layer(u).square().sum(), u, create_graph=True)
    assert torch.autograd.grad(du.sum(), u)[0].any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(form):
    layer = make(H=2, l_max=8, kernel_dim=2, bidirectional=True, postact="glu", **form).double()
    names = [name for name, _ in layer.named_parameters()]

    def run(u, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (u,))

    inputs = [noise(1, 2, 6), *(p.detach().clone() for p in layer.parameters())]
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_a_level_changed_between_two_steps_leaves_the_curve_alone():
    curves = []
    for levels in (("none",) * 6, ("pointwise", "layer", "none", "block", "layer", "pointwise")):
        layer = make(l_max=32, dropout=0.2).double()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        torch.manual_seed(9)
        losses = []
        for level in levels:
            layer.set_recompute(level)
            loss = F.mse_loss(layer(noise(4, 6, 32)), noise(4, 6, 32, seed=8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert all(a > b for a, b in pairwise(curves[0][::5]))
    assert curves[0] == pytest.approx(curves[1], rel=1e-12)


@pytest.mark.parametrize(
    ("u", "keywords", "message"),
    [
        (torch.zeros(2, 5, 8), {}, r"u \(B, H, L\) with H = 6"),
        (torch.zeros(2, 6), {}, r"u \(B, H, L\)"),
        (torch.zeros(2, 6), {"lengths": torch.tensor([1, 2])}, r"an input \(B, H, L\) beside lengths, got \(2, 6\)"),
        (torch.zeros(6), {"lengths": torch.tensor([1])}, r"an input \(B, H, L\) beside lengths, got \(6,\)"),
        (torch.zeros(2, 6, 8, dtype=torch.float64), {}, "torch.float32"),
        (torch.zeros(2, 6, 0), {}, "length of at least 1"),
        (torch.zeros(2, 6, 8), {"lengths": torch.tensor([1, 2, 3])}, r"integers \(2,\)"),
        (torch.zeros(2, 6, 8), {"lengths": torch.tensor([1.0, 2.0])}, "integers"),
        (torch.zeros(2, 6, 8), {"lengths": torch.tensor([1, 2]), "padding_side": "up"}, "'right', 'left'"),
        (torch.zeros(2, 6, 8), {"padding_side": "up"}, "'right', 'left'"),
    ],
)
def test_refused_inputs_are_named_in_one_line(u, keywords, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        make()(u, **keywords)
    assert "\n" not in str(caught.value)
