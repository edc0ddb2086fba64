"""The sequence model: levels against plain, padded rows against rows alone, streams against the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.levels import LEVELS
from lowtide.models import SequenceModel
from lowtide.nn import clone_state

LEAN = [level for level in LEVELS if level != "none"]


def model_of(**keywords) -> SequenceModel:
    torch.manual_seed(3)
    settings = {"d_model": 6, "n_layers": 3, "l_max": 40, "kernel_dim": 4, "recompute": "none"} | keywords
    model = SequenceModel(3, 5, **settings).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def trained(model: SequenceModel, x: Tensor, lengths: Tensor | None, side: str) -> dict[str, Tensor]:
    """Two SGD steps; outputs, gradients of the last, buffers, eval output, generator."""
    torch.manual_seed(7)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: dict[str, Tensor] = {}
    for i in range(2):
        optimizer.zero_grad()
        image = x.clone().requires_grad_()
        y = model(image, lengths, side)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(i), dtype=y.dtype)
        (y * weights).sum().backward()
        seen |= {f"y{i}": y.detach(), f"x.grad{i}": image.grad}
        seen |= {f"{name}.grad{i}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    seen |= {name: value.double() for name, value in model.named_buffers()}
    seen["rng"] = torch.get_rng_state().double()
    model.eval()
    seen["eval"] = model(x, lengths, side).detach()
    return seen


@pytest.mark.parametrize("level", LEAN)
@pytest.mark.parametrize(
    ("keywords", "lengths", "side"),
    [
        ({"bidirectional": True, "postact": "glu", "dropout": 0.3}, None, "right"),
        ({"prenorm": False, "norm": "layer", "pool": None, "channels": 2}, [17, 5, 0, 11], "left"),
        ({"pool": "last", "dropout": 0.2, "tie_dropout": True}, [17, 5, 1, 11], "right"),
    ],
)
def test_levels_train_as_plain(level, keywords, lengths, side):
    x = torch.randn(4, 17, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = None if lengths is None else torch.tensor(lengths)
    plain = model_of(**keywords)
    lean = copy.deepcopy(plain)
    lean.set_recompute(level)
    expected, got = trained(plain, x, rows, side), trained(lean, x, rows, side)
    assert expected.keys() == got.keys()
    largest = max(float(v.norm()) for name, v in expected.items() if "grad" in name)
    for name, value in expected.items():
        scale = largest if "grad" in name else max(float(value.norm()), 1e-3)
        error = float((got[name] - value).norm())
        assert error <= 1e-9 * scale, (name, error, scale)
        if not name.endswith("num_batches_tracked"):
            assert float((1.01 * value - value).norm()) > 1e-9 * scale or float(value.norm()) < 1e-9 * largest, name


def test_verifier_agrees_at_level_block():
    plain = model_of(bidirectional=True)
    lean = copy.deepcopy(plain)
    lean.set_recompute("block")
    # in float32 six numbers of a bias gradient can miss twice plain's error by luck; the levels are compared above
    report = lowtide.verify(plain, lean, torch.randn(4, 17, 3, dtype=torch.float64), dtype=torch.float64)
    report.raise_if_failed()


@pytest.mark.parametrize("pool", ["mean", "last", None])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_padded_rows_equal_rows_alone(pool, side, norm):
    model = model_of(pool=pool, norm=norm, bidirectional=True)
    with torch.no_grad():
        model(torch.randn(8, 30, 3, dtype=torch.float64))  # running statistics that are not 0 and 1
    model.eval()
    lengths = [30, 13, 1, 22]
    x = torch.full((4, 30, 3), float("nan"), dtype=torch.float64)
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
        if side == "left":
            x[i] = x[i].roll(30 - len(row), 0)
    y = model(x, torch.tensor(lengths), side)
    for i, row in enumerate(rows):
        alone = model(row[None])[0]
        padded = y[i]
        if pool is None:
            counts = slice(0, len(row)) if side == "right" else slice(30 - len(row), 30)
            counted = torch.zeros(30, dtype=torch.bool)
            counted[counts] = True
            assert not padded[~counted].any()
            padded = padded[counted]
        assert alone.abs().max() > 1e-2
        torch.testing.assert_close(padded, alone, rtol=1e-11, atol=1e-12)


def test_batch_norm_ignores_padding_in_training():
    """What lies at padding changes nothing; and the statistics are those of the positions that count."""
    x = torch.randn(3, 12, 3, dtype=torch.float64)
    lengths = torch.tensor([12, 4, 7])
    other = x.clone()
    other[1, 4:], other[2, 7:] = 1e6, float("nan")
    first, second = model_of(), model_of()
    torch.testing.assert_close(first(x, lengths), second(other, lengths), rtol=0, atol=0)
    for a, b in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(a, b)
    counted = torch.cat([first.encoder(x[i, :n]) for i, n in enumerate(lengths)])
    torch.testing.assert_close(first.blocks[0].norm.norm.running_mean, 0.1 * counted.mean(0).detach())


@pytest.mark.parametrize("pool", ["mean", "last", None])
@pytest.mark.parametrize(("prenorm", "norm"), [(True, "batch"), (False, "layer")])
def test_streams_equal_the_whole(pool, prenorm, norm):
    model = model_of(pool=pool, prenorm=prenorm, norm=norm, postact="glu", l_max=16)
    with torch.no_grad():
        model(torch.randn(8, 30, 3, dtype=torch.float64))
    model.eval()
    x = torch.randn(2, 41, 3, dtype=torch.float64)  # longer than all the taps
    whole = model(x)
    state = model.initial_state(2)
    outputs, start = [], 0
    for size in (1, 7, 1, 1, 20):
        if size == 1:
            y, state = model.step(x[:, start], state)
            outputs.append(y[:, None])
        else:
            y, state = model.prefill(x[:, start : start + size], state)
            outputs.append(y if pool is None else y[:, None])
        start += size
    rewound = clone_state(state)
    last, _ = model.prefill(x[:, start:], state)
    again, _ = model.prefill(x[:, start:], rewound)
    assert torch.equal(last, again)
    if pool is None:
        torch.testing.assert_close(torch.cat([*outputs, last], 1), whole, rtol=1e-11, atol=1e-12)
    else:
        torch.testing.assert_close(last, whole, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(outputs[2][:, 0], model(x[:, :9]), rtol=1e-11, atol=1e-12)


def test_tokens():
    model = SequenceModel(1, 7, 6, 2, 16, kernel_dim=4, pool=None, embedding=9).eval()
    tokens = torch.randint(9, (2, 16))
    state = model.initial_state(2)
    y, state = model.prefill(tokens[:, :15], state)
    last, _ = model.step(tokens[:, 15], state)
    torch.testing.assert_close(torch.cat([y, last[:, None]], 1), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="integer tokens"):
        model(torch.randn(2, 16))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_of_tokens_equal_rows_alone(side):
    torch.manual_seed(0)
    model = SequenceModel(1, 7, 6, 2, 16, kernel_dim=4, embedding=9, bidirectional=True).double().eval()
    rows = [torch.randint(9, (n,)) for n in (16, 5, 1)]
    tokens = torch.zeros(3, 16, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, slice(len(row)) if side == "right" else slice(16 - len(row), None)] = row
    y = model(tokens, torch.tensor([16, 5, 1]), side)
    alone = torch.cat([model(row[None]) for row in rows])
    torch.testing.assert_close(y, alone, rtol=1e-11, atol=1e-12)
    assert (y - model(tokens))[1:].abs().amax(1).min() > 1e-3  # without lengths the padding is seen


@pytest.mark.parametrize(("level", "units"), [("layer", 2), ("pointwise", 3), ("block", 1)])
def test_kept_bytes(level, units):
    """Per block `units` maps (B, H, L), written from the shapes; the rest of the model the same at every level."""
    B, L, H = 2, 64, 16
    kept = []
    for n_layers in (2, 5):
        model = SequenceModel(3, 5, H, n_layers, L, kernel_dim=4, norm="layer", recompute=level, bidirectional=True)
        kept.append(lowtide.measure(model, torch.randn(B, L, 3), repeats=1).saved_bytes)
    statistics = 2 * B * L * 4  # layer norm's mean and rstd
    expected = units * B * H * L * 4 + (0 if level == "block" else statistics)
    assert kept[1] - kept[0] == 3 * expected


def test_refusals():
    with pytest.raises(UnsupportedError, match="causal"):
        model_of(bidirectional=True).eval().initial_state(1)
    with pytest.raises(UnsupportedError, match="eval"):
        model_of().initial_state(1)
    with pytest.raises(ArgumentError, match="pool"):
        SequenceModel(1, 1, 1, 1, 1, pool="max")
    with pytest.raises(TypeError, match="kernel_dimm"):
        SequenceModel(1, 1, 1, 1, 1, kernel_dimm=3)
    with pytest.raises(ArgumentError, match=r"\(B, L, 3\)"):
        model_of()(torch.randn(2, 17, 4, dtype=torch.float64))
    x = torch.randn(2, 17, 3, dtype=torch.float64)
    with pytest.raises(
        ArgumentError, match=r"SequenceModel\(lengths=\): expected integers \(2,\), one per row, got \(3,\) int64"
    ):
        model_of()(x, torch.tensor([1, 2, 3]))
    for lengths in (None, torch.tensor([1, 2])):
        with pytest.raises(ArgumentError, match="'right', 'left'"):
            model_of()(x, lengths, "up")


FIXED = {"decay": "power_fixed", "decay_min": 1.0, "decay_max": 1.0, "dropout": 0.2, "tie_dropout": True}
LRA = {
    "listops": (2048, {"kernel_dim": 1, "n_scales": 12, "prenorm": False}, 2048),
    "text": (4096, {"kernel_dim": 2, "n_scales": 12}, 4096),
    "retrieval": (4000, {"kernel_dim": 1, "n_scales": 13}, 4096),
    "image": (1024, {"kernel_dim": 32, "prenorm": False, "norm": "layer", **FIXED}, 1024),
    "pathfinder": (1024, {"kernel_dim": 32, "dropout": 0.2}, 1024),
    "path-x": (16384, {"kernel_dim": 64, "init_scale": 1, "init": "cos", "decay_min": 1.0, "decay_max": 3.0}, 16384),
}  # fmt: skip


@pytest.mark.parametrize("task", LRA)
def test_long_range_arena_rows(task):
    """Kernel lengths as in the paper's table, and a gradient for every piece."""
    l_max, keywords, taps = LRA[task]
    model = SequenceModel(1, 10, 8, 2, l_max, bidirectional=True, postact="glu", **keywords)
    scales = {"listops": 12, "text": 12, "retrieval": 13, "image": 6, "pathfinder": 6, "path-x": 8}[task]
    assert model.blocks[0].layer.form.kernel.n_scales == scales
    assert model.blocks[0].layer.form.kernel.taps == taps
    model(torch.randn(2, l_max, 1)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.blocks[0].layer.kernel_parameters())
