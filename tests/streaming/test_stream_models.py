"""Whole models in chunks against `forward`: two-sided with look-ahead, causal, tokens, state as a value, refusals."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from stream_cases import block_sizes, relative_error

from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.models import SequenceModel

MODELS = {
    "two-sided": {"bidirectional": True},
    "two-sided, behind": {"bidirectional": True, "prenorm": False, "channels": 2},
    "two-sided, layer norm, glu": {"bidirectional": True, "norm": "layer", "postact": "glu"},
    "two-sided, power": {"bidirectional": True, "decay": "power", "decay_min": 0.5},
    "two-sided, tokens": {"bidirectional": True, "embedding": 7},
    "causal": {},
}


def make_model(dtype=torch.float64, **options) -> SequenceModel:
    """Three layers of 32 taps; norms that do something."""
    torch.manual_seed(0)
    model = SequenceModel(3, 5, 6, 3, 32, **{"pool": None, "kernel_dim": 4, **options}).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model(draw(model, 8, 40))
    return model.eval()


def draw(model: SequenceModel, B: int, L: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model.tokens:
        return torch.randint(7, (B, L), generator=generator)
    return torch.randn(B, L, 3, generator=generator, dtype=torch.float64).to(model.decoder.weight.dtype)


def assert_same(state, other) -> None:
    for own, expected in zip(state["blocks"], other["blocks"], strict=True):
        assert torch.equal(own["late"], expected["late"])
        assert all(torch.equal(own["layer"][name], leaf) for name, leaf in expected["layer"].items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", ["1", "7", "64", "random"])
@pytest.mark.parametrize("L", [1, 40, 300])
def test_chunks_equal_the_whole(name: str, sizes: str, L: int) -> None:
    """Shorter than one layer's taps, than all layers', and longer; twice, as finish leaves a new state."""
    model = make_model(**MODELS[name])
    x = draw(model, 2, L)
    with torch.no_grad():
        want = model(x)
    assert model.lookahead == (96 if "two-sided" in name else 0)
    state = model.chunk_state(2)
    for _ in range(2):
        outputs, fed = [], 0
        for part in x.split([size for size in block_sizes(sizes, L) if size] or [L], dim=1):
            y, state = model.chunk(part, state)
            outputs.append(y)
            fed += part.shape[1]
            assert sum(y.shape[1] for y in outputs) == max(0, fed - model.lookahead)
        y, state = model.finish(state)
        assert relative_error(torch.cat([*outputs, y], 1), want) < 1e-12
        assert_same(state, model.chunk_state(2))


def test_float32_follows_the_rule() -> None:
    model = make_model(torch.float32, bidirectional=True)
    oracle = copy.deepcopy(model).double()
    x = draw(model, 2, 500)
    with torch.no_grad():
        want, plain = oracle(x.double()), model(x)
    state = model.chunk_state(2)
    outputs = [model.chunk(part, state)[0] for part in x.split([100, 1, 3, 396], dim=1)]
    got = torch.cat([*outputs, model.finish(state)[0]], 1)
    assert relative_error(got, want) <= 2 * relative_error(plain, want) + 4 * torch.finfo(torch.float32).eps


def test_saved_between_chunks() -> None:
    model = make_model(bidirectional=True)
    x = draw(model, 1, 250)
    state = model.chunk_state(1)
    first, state = model.chunk(x[:, :177], state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    second, loaded = model.chunk(x[:, 177:], loaded)
    with torch.no_grad():
        want = model(x)
    assert relative_error(torch.cat([first, second, model.finish(loaded)[0]], 1), want) < 1e-12


def test_nothing_heard_and_empty_chunks() -> None:
    model = make_model(bidirectional=True)
    state = model.chunk_state(2)
    assert model.chunk(draw(model, 2, 3)[:, :0], state)[0].shape == (2, 0, 5)
    assert model.finish(state)[0].shape == (2, 0, 5)


def test_refusals() -> None:
    model = make_model(bidirectional=True)
    with pytest.raises(UnsupportedError, match="pool=None"):
        make_model(pool="mean").chunk_state(1)
    with pytest.raises(UnsupportedError, match="call chunk"):
        model.step(draw(model, 1, 1)[:, 0], {})
    state = model.chunk_state(1)
    with pytest.raises(ArgumentError, match=r"\(B, L, 3\)"):
        model.chunk(torch.zeros(1, 4, 2).double(), state)
    with pytest.raises(ArgumentError, match="a state"):
        model.chunk(draw(model, 2, 4), state)
    with pytest.raises(UnsupportedError, match="eval mode"):
        model.train().chunk(draw(model, 1, 4), state)
