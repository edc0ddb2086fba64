"""SGConv streamed against SGConv called on the whole input: options, blocks, rows, weights that change, two sides."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from stream_cases import block_sizes, relative_error
from torch import nn

from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.nn import SGConv, clone_state, reset_rows

OPTIONS = {
    "default": {},
    "two outputs, rows": {"channels": 2, "transposed": False, "activation": "silu"},
    "glu and norm": {"postact": "glu", "norm": True, "dropout": 0.3},
    "linear": {"channels": 2, "linear": True},
    "sum, nearest": {"combine": "sum", "interpolation": "nearest", "init_scale": 1},
    "wrap, cosines": {"alignment": "wrap", "init": "cos", "decay_min": 1.0},
    "align_corners": {"alignment": "align_corners"},
    "drop_last": {"alignment": "drop_last"},
    "power": {"decay": "power", "decay_min": 0.5, "channels": 2},
    "power_fixed": {"decay": "power_fixed", "decay_min": 0.5, "combine": "sum"},
    "one number": {"kernel_dim": 1},
}


def make_layer(dtype=torch.float64, **options) -> SGConv:
    torch.manual_seed(0)
    return SGConv(6, 128, **{"kernel_dim": 16, **options}).to(dtype).eval()


def draw(layer: SGConv, B: int, L: int, dtype=torch.float64):
    u = torch.randn(B, 6, L, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return u if layer.form.transposed else u.transpose(1, 2)


def time_axis(layer: SGConv) -> int:
    return 2 if layer.form.transposed else 1


@torch.no_grad()
def streamed(layer: SGConv, u, state, sizes: list[int]):
    """In blocks; a block of one sample is a step."""
    axis = time_axis(layer)
    outputs = []
    for part in u.split(sizes, dim=axis):
        if part.shape[axis] == 1:
            y, state = layer.step(part.squeeze(axis), state)
            outputs.append(y.unsqueeze(axis))
        else:
            y, state = layer.prefill(part, state)
            outputs.append(y)
    return torch.cat(outputs, dim=axis)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", ["1", "7", "64", "random"])
def test_blocks_equal_forward(name, sizes):
    """500 samples: several times l_max, beyond all 128 or 256 taps."""
    layer = make_layer(**OPTIONS[name])
    u = draw(layer, 2, 500)
    with torch.no_grad():
        want = layer(u)
    got = streamed(layer, u, layer.initial_state(2), block_sizes(sizes, 500))
    assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_follows_the_rule(dtype):
    layer = make_layer(dtype)
    oracle = copy.deepcopy(layer).double()
    u = draw(layer, 2, 500, dtype)
    with torch.no_grad():
        want, plain = oracle(u.double()), layer(u)
    got = streamed(layer, u, layer.initial_state(2), block_sizes("random", 500))
    assert got.dtype == dtype
    assert relative_error(got, want) <= 2 * relative_error(plain, want) + 4 * torch.finfo(dtype).eps


def test_under_autocast():
    layer = make_layer(torch.float32, decay="power")
    u = draw(layer, 2, 300, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = layer(u)
        got = streamed(layer, u, layer.initial_state(2), [100, 1, 199])
    assert got.dtype == want.dtype == torch.bfloat16
    assert relative_error(got, want.double()) < 0.01


def test_rows_of_different_length_equal_the_row_alone():
    layer = make_layer()
    u = draw(layer, 3, 200)
    lengths = torch.tensor([200, 63, 0])
    state = layer.initial_state(3)
    padded = torch.where(torch.arange(200) >= 200 - lengths.view(3, 1, 1), u, torch.nan)
    prompt, state = layer.prefill(padded, state, lengths=lengths)
    more = draw(layer, 3, 50)
    rest, state = layer.prefill(more, state)
    for row, length in enumerate(lengths):
        alone = torch.cat([u[row : row + 1, :, 200 - length :], more[row : row + 1]], -1)
        with torch.no_grad():
            want = layer(alone)
        got = torch.cat([prompt[row : row + 1, :, 200 - length :], rest[row : row + 1]], -1)
        assert relative_error(got, want) < 1e-12
        assert not prompt[row, :, : 200 - length].any()


def test_two_layers_deep_rows_start_at_different_times():
    first, second = make_layer(), make_layer(decay="power", decay_min=0.5)
    u = draw(first, 2, 300)
    state = {"layers": [first.initial_state(2), second.initial_state(2)]}
    outputs = []
    for t in range(300):
        if t == 120:
            reset_rows(state, torch.tensor([False, True]))
        x, _ = first.step(u[..., t], state["layers"][0])
        y, _ = second.step(x, state["layers"][1])
        outputs.append(y)
    got = torch.stack(outputs, -1)
    with torch.no_grad():
        assert relative_error(got[:1], second(first(u[:1]))) < 1e-12
        assert relative_error(got[1:, :, 120:], second(first(u[1:, :, 120:]))) < 1e-12


CHANGES = {
    "optimiser": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.5).step(),
    "fused optimiser": lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step(),
    "foreach optimiser": lambda layer: torch.optim.Adam(layer.parameters(), lr=0.5, foreach=True).step(),
    "in place": lambda layer: layer.kernel_list[0].detach().mul_(-2),
    "under no_grad": lambda layer: torch.no_grad()(lambda: layer.kernel_list[0].mul_(-2))(),
    "replaced": lambda layer: layer.kernel_list.__setitem__(1, nn.Parameter(torch.ones_like(layer.kernel_list[1]))),
    "norm": lambda layer: layer.kernel_norm.mul_(0.5),
    "skip": lambda layer: layer.D.detach().add_(1.0),
    "loaded": lambda layer: layer.load_state_dict({k: v + 0.5 for k, v in layer.state_dict().items()}),
    "refreshed norm": lambda layer: (layer.kernel_list[2].detach().mul_(3), layer.refresh_norm()),
    "data": lambda layer: (layer.kernel_list[0].data.mul_(-2), layer.forget_stream()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_used_at_once(change):
    layer = make_layer()
    u = draw(layer, 1, 200)
    state = layer.initial_state(1)
    before = streamed(layer, u, clone_state(state), [200])
    streamed(layer, u[..., :150], state, [150])
    layer(u).sum().backward()
    CHANGES[change](layer)
    with torch.no_grad():
        want = layer(u)
    assert relative_error(before, want) > 1e-3
    assert relative_error(streamed(layer, u[..., 150:], state, [1] * 5 + [45]), want[..., 150:]) < 1e-12


@pytest.mark.parametrize("decay", ["scale", "power"])
def test_moved_to_another_dtype(decay):
    """Coefficients and new states are of the dtype that the layer has now; an old state is refused."""
    layer = make_layer(decay=decay)
    u = draw(layer, 1, 200)
    old = layer.initial_state(1)
    streamed(layer, u, old, [200])
    layer.to(torch.float32)
    state = layer.initial_state(1)
    assert state["ring"].dtype == torch.float32
    oracle = copy.deepcopy(layer).double()
    with torch.no_grad():
        want, plain = oracle(u), layer(u.float())
    got = streamed(layer, u.float(), state, [1] * 5 + [195])
    assert relative_error(got, want) <= 2 * relative_error(plain, want) + 4 * torch.finfo(torch.float32).eps
    with pytest.raises(ArgumentError, match=r"a contiguous state of torch\.float32"):
        layer.prefill(u.float(), old)
    layer.to(torch.float64)
    assert relative_error(streamed(layer, u, layer.initial_state(1), [200]), want) < 1e-12


def test_a_parameter_that_takes_the_place_of_a_freed_one():
    """The same address and version as before, other numbers."""
    layer = make_layer()
    u = draw(layer, 1, 100)
    for value in range(1, 12):
        layer.kernel_list[1] = nn.Parameter(torch.empty(0))  # frees the one before
        layer.kernel_list[1] = nn.Parameter(torch.full((1, 6, 16), float(value), dtype=torch.float64))
        with torch.no_grad():
            assert relative_error(streamed(layer, u, layer.initial_state(1), [100]), layer(u)) < 1e-12


def test_coefficients_are_made_once_per_weights(monkeypatch):
    from lowtide.nn import sgconv_stream

    made = []
    original = sgconv_stream.stream_filter
    monkeypatch.setattr(sgconv_stream, "stream_filter", lambda *a, **k: made.append(1) or original(*a, **k))
    layer = make_layer()
    u = draw(layer, 1, 30)
    streamed(layer, u, layer.initial_state(1), [1] * 30)
    assert len(made) == 1
    other = copy.deepcopy(layer)
    streamed(other, u, other.initial_state(1), [1] * 30)
    assert len(made) == 2
    assert "_stream_cache" not in pickle.loads(pickle.dumps(layer)).__dict__


def test_saved_with_torch_and_moved_between_layers_of_the_same_weights():
    layer = make_layer(decay="power")
    u = draw(layer, 2, 200)
    state = layer.initial_state(2)
    first = streamed(layer, u[..., :77], state, [64, 13])
    file = io.BytesIO()
    torch.save({"model": layer.state_dict(), "state": state}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    fresh = make_layer(decay="power", decay_min=0.1)
    fresh.load_state_dict(stored["model"])
    rest = streamed(fresh, u[..., 77:], stored["state"], [51, 1, 71])
    with torch.no_grad():
        assert relative_error(torch.cat([first, rest], -1), layer(u)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"decay": "power", "linear": True, "channels": 2}])
@pytest.mark.parametrize("L", [1, 50, 400])
def test_two_sided_refuses_to_step_and_processes_chunks(options, L):
    layer = make_layer(bidirectional=True, **options)
    assert layer.lookahead == layer.form.kernel.taps == 128
    u = draw(layer, 2, L)
    state = layer.initial_state(2)
    for refused in (lambda: layer.step(u[..., 0], state), lambda: layer.prefill(u, state)):
        with pytest.raises(UnsupportedError, match="needs the 128 inputs that follow it"):
            refused()
    with torch.no_grad():
        want = layer(u)
    for _ in range(2):  # finish leaves an initial state
        outputs = []
        for part in u.split([size for size in block_sizes("random", L) if size] or [L], dim=2):
            y, state = layer.chunk(part, state)
            outputs.append(y)
            fed = int(state["position"])
            assert sum(y.shape[-1] for y in outputs) == max(0, fed - 128)
        y, state = layer.finish(state)
        assert relative_error(torch.cat([*outputs, y], -1), want) < 1e-12
        assert int(state["position"]) == 0


def test_chunk_of_a_causal_layer_is_prefill():
    layer = make_layer()
    u = draw(layer, 1, 60)
    y, state = layer.chunk(u, layer.initial_state(1))
    rest, _ = layer.finish(state)
    with torch.no_grad():
        assert relative_error(y, layer(u)) < 1e-12
    assert rest.shape == (1, 6, 0)


def test_dropout_in_training_and_wrong_shapes_are_refused():
    layer = make_layer(dropout=0.5)
    state = layer.initial_state(2)
    with pytest.raises(UnsupportedError, match="eval mode"):
        layer.train().step(torch.zeros(2, 6).double(), state)
    layer.eval()
    with pytest.raises(ArgumentError, match=r"u_t \(B, 6\)"):
        layer.step(torch.zeros(2, 5).double(), state)
    with pytest.raises(ArgumentError, match=r"u \(B, 6, T\)"):
        layer.prefill(torch.zeros(2, 5, 6).double(), state)
    with pytest.raises(ArgumentError, match="a state"):
        layer.step(torch.zeros(3, 6).double(), state)
    with pytest.raises(ArgumentError, match="batch_size"):
        layer.initial_state(0)
    with pytest.raises(ArgumentError, match=r"integers \(2,\)"):
        layer.prefill(torch.zeros(2, 6, 4).double(), state, lengths=torch.ones(2))
    assert int(state["position"]) == 0


def test_steps_build_no_graph_and_draw_no_random_numbers():
    layer = make_layer(dropout=0.5)
    random_state = torch.get_rng_state()
    y, state = layer.step(torch.ones(1, 6).double().requires_grad_(), layer.initial_state(1))
    assert not y.requires_grad
    assert not any(leaf.requires_grad for leaf in state.values())
    assert torch.equal(random_state, torch.get_rng_state())
