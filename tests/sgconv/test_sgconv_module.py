"""The module: arguments, names, the norm's life, files, copies, groups for the optimiser."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from sgconv_compare import assert_near
from sgconv_direct import direct_kernel
from torch import nn

from lowtide.errors import ArgumentError, CheckpointError
from lowtide.nn import SGConv, parameter_groups

# task: length, d_model, kernel_dim, init_scale, scales, taps, further arguments
LONG_RANGE_ARENA = {
    "listops": (2048, 128, 1, 0, 12, 2048, {}),
    "text": (4096, 256, 2, 0, 12, 4096, {}),
    "retrieval": (4000, 256, 1, 0, 13, 4096, {}),
    "image": (1024, 512, 32, 0, 6, 1024, {"decay": "power_fixed", "decay_min": 1.0, "decay_max": 1.0}),
    "pathfinder": (1024, 256, 32, 0, 6, 1024, {}),
    "path-x": (16384, 256, 64, 1, 8, 16384, {"init": "cos", "decay_min": 1.0, "decay_max": 3.0}),
}


@pytest.mark.parametrize("task", LONG_RANGE_ARENA)
def test_rows_of_the_long_range_arena(task):
    length, d_model, kernel_dim, init_scale, scales, taps, more = LONG_RANGE_ARENA[task]
    layer = SGConv(d_model, length, kernel_dim, init_scale=init_scale, bidirectional=True, postact="glu", **more)
    assert len(layer.kernel_list) == layer.form.kernel.n_scales == scales
    assert layer.form.kernel.taps == taps >= length
    assert layer.kernel_norm.shape == (2, d_model, 1)
    few = SGConv(2, length, kernel_dim, init_scale=init_scale, bidirectional=True, postact="glu", **more)
    few(torch.randn(1, 2, length)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in few.parameters())


def test_signature_is_the_one_that_is_promised():
    promised = (
        "d_model l_max kernel_dim=64 n_scales=None init_scale=0 channels=1 bidirectional=False init='randn' "
        "combine='cat' interpolation='linear' alignment='half_pixel' decay='scale' decay_min=2.0 decay_max=2.0 "
        "activation='gelu' postact=None dropout=0.0 tie_dropout=False norm=False linear=False transposed=True "
        "recompute='pointwise'"
    )
    parameters = list(inspect.signature(SGConv).parameters.values())
    assert " ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters) == promised


def test_names_and_shapes_of_the_state_dict():
    layer = SGConv(4, 32, 8, channels=3, bidirectional=True, postact="glu", norm=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        "D": (3, 4),
        "kernel_list.0": (6, 4, 8),
        "kernel_list.1": (6, 4, 8),
        "kernel_list.2": (6, 4, 8),
        "kernel_norm": (6, 4, 1),
        "multiplier": (1, 4, 1),
        "output_linear.weight": (8, 12),
        "output_linear.bias": (8,),
        "norm.weight": (12,),
        "norm.bias": (12,),
    }
    for decay in ("power", "power_fixed"):
        state = SGConv(4, 32, 8, decay=decay, decay_min=0.5, decay_max=1.0).state_dict()
        assert state["multiplier"].shape == ()
        assert state["multiplier"] == 1
        assert state["decay"].shape == (4,)
        assert ((state["decay"] >= 0.5) & (state["decay"] <= 1.0)).all()
    assert dict(SGConv(4, 32, decay="power").named_parameters()).keys() >= {"decay"}
    assert "decay" not in dict(SGConv(4, 32, decay="power_fixed").named_parameters())
    assert all(buffer.dtype != torch.bool for buffer in layer.buffers())
    assert not any("output_linear" in name for name in SGConv(4, 32, linear=True).state_dict())


def test_kernel_method_is_the_normed_kernel_forward_then_reverse():
    layer = SGConv(3, 32, 4, channels=2, bidirectional=True).double()
    full = direct_kernel(list(layer.kernel_list), layer.multiplier, None, layer.form.kernel) / layer.kernel_norm
    assert_near(layer.kernel(32), full, 1e-13)
    assert_near(layer.kernel(40)[..., :32], full, 1e-13)
    assert not layer.kernel(40)[..., 32:].any()
    # an impulse reads the kernels off: lag j behind it, lag -(j+1) before it
    flat = copy.deepcopy(layer)
    flat.form = SGConv(3, 32, 4, channels=2, bidirectional=True, linear=True).form
    flat.output_linear = None
    with torch.no_grad():
        flat.D.zero_()
    u = torch.zeros(1, 3, 61, dtype=torch.float64)
    u[..., 30] = 1.0
    y = flat(u).view(2, 3, 61)
    assert_near(y[..., 30:], full[:2, :, :31], 1e-12)
    assert_near(y[..., :30], full[2:, :, :30].flip(-1), 1e-12)


@pytest.mark.parametrize("decay", ["scale", "power", "power_fixed"])
def test_the_norm_is_made_at_construction_and_then_constant(decay):
    torch.manual_seed(0)
    layer = SGConv(4, 64, 4, decay=decay, decay_min=1.0, decay_max=2.0, bidirectional=True)
    full = layer.kernel(layer.form.kernel.taps)
    torch.testing.assert_close(full.norm(dim=-1), torch.ones(2, 4), rtol=1e-6, atol=0)
    made = layer.kernel_norm.clone()
    assert not made.requires_grad
    torch.manual_seed(0)
    again = SGConv(4, 64, 4, decay=decay, decay_min=1.0, decay_max=2.0, bidirectional=True)
    assert torch.equal(again.kernel_norm, made)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for length in (5, 64, 100):
        layer.train()
        layer(torch.randn(2, 4, length)).square().sum().backward()
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            layer(torch.randn(2, 4, length))
    assert torch.equal(layer.kernel_norm, made)
    assert (layer.kernel(64).norm(dim=-1) - 1).abs().max() > 1e-3  # the kernel moved
    layer.refresh_norm()
    assert not torch.equal(layer.kernel_norm, made)
    torch.testing.assert_close(layer.kernel(64).norm(dim=-1), torch.ones(2, 4), rtol=1e-6, atol=0)


def test_constants_stay_in_float32_through_casts_and_follow_into_float64():
    start = SGConv(4, 2**17, 16, decay_min=1.0, decay_max=3.0, bidirectional=True)
    assert start.kernel_norm.max() > torch.finfo(torch.float16).max
    for cast in (
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.bfloat16).float(),
        lambda m: m.double().half(),
        lambda m: nn.Sequential(m).half()[0],
        lambda m: m.to("cpu", torch.bfloat16),
    ):
        layer = cast(copy.deepcopy(start))
        assert layer.kernel_norm.dtype == layer.multiplier.dtype == torch.float32
        assert torch.equal(layer.kernel_norm, start.kernel_norm)
        assert torch.equal(layer.multiplier, start.multiplier)
    assert copy.deepcopy(start).double().kernel_norm.dtype == torch.float64
    half = copy.deepcopy(start).half()
    u = torch.randn(1, 4, 3000).half()
    y = half(u)
    assert y.dtype == torch.float16
    assert_near(y, copy.deepcopy(half).float()(u.float()), 2e-3)
    half.refresh_norm()  # made in float32 from the rounded pieces
    torch.testing.assert_close(half.kernel_norm, start.kernel_norm, rtol=1e-3, atol=0)
    fixed = SGConv(4, 32, decay="power_fixed", decay_min=0.3, decay_max=0.7).bfloat16()
    assert fixed.decay is not None
    assert fixed.decay.dtype == torch.float32


def test_saved_after_a_forward_it_loads_strictly_into_a_fresh_module():
    layer = SGConv(4, 32, 8, channels=2, bidirectional=True, postact="glu")
    layer(torch.randn(2, 4, 32)).sum().backward()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = SGConv(4, 32, 8, channels=2, bidirectional=True, postact="glu")
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    u = torch.randn(2, 4, 32)
    assert torch.equal(fresh(u), layer(u))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(u), layer(u))
    half = SGConv(4, 32, 8, channels=2, bidirectional=True, postact="glu").half()
    half.load_state_dict(layer.state_dict())
    assert torch.equal(half.kernel_norm, layer.kernel_norm)


def public_file(layer: SGConv, *, norm: str, flag: bool | None) -> dict[str, torch.Tensor]:
    """`layer` in the layout of the public code."""
    state = {}
    for name, tensor in layer.state_dict().items():
        if name.startswith("output_linear."):
            tail = name.removeprefix("output_linear.")
            tensor = tensor[:, None] if tail == "bias" and layer.form.transposed else tensor
            name = f"output_linear.0.{tail}" if layer.form.postact else name
        state[name] = tensor.clone()
    if norm == "flat":
        state["kernel_norm"] = torch.ones(layer.d_model, 1)
    elif norm == "absent":
        del state["kernel_norm"]
    if flag is not None:
        state["kernel_norm_initialized"] = torch.tensor(flag)
    return state


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("postact", [None, "glu"])
@pytest.mark.parametrize("decay", ["scale", "power"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("norm", "flag", "kept"),
    [
        ("full", True, True),
        ("full", None, True),
        ("full", False, False),
        ("flat", False, False),
        ("flat", None, False),
        ("absent", None, False),
    ],
)
def test_public_files_load(bidirectional, postact, decay, transposed, norm, flag, kept):
    arguments = {
        "bidirectional": bidirectional,
        "postact": postact,
        "decay": decay,
        "transposed": transposed,
        "channels": 2,
    }
    torch.manual_seed(0)
    source, target = SGConv(4, 32, 8, **arguments), SGConv(4, 32, 8, **arguments)
    made = source.kernel_norm.clone()
    source.kernel_norm.mul_(3.0)  # a norm that only the file can have
    target.load_public(public_file(source, norm=norm, flag=flag))
    torch.testing.assert_close(target.kernel_norm, source.kernel_norm if kept else made, rtol=1e-6, atol=0)
    source.kernel_norm.copy_(target.kernel_norm)
    u = torch.randn(2, 4, 20) if transposed else torch.randn(2, 20, 4)
    assert torch.equal(target(u), source(u))


def test_public_files_that_do_not_fit_change_nothing():
    layer = SGConv(4, 32, 8)
    before = copy.deepcopy(layer.state_dict())
    good = public_file(SGConv(4, 32, 8), norm="full", flag=True)
    for change, message in (
        ({"extra": torch.ones(1)}, "unknown: extra"),
        ({"D": None}, "missing: D"),
        ({"D": torch.ones(1, 5)}, r"D \(1, 4\), got \(1, 5\)"),
        ({"decay": torch.ones(4)}, "file's mode"),
    ):
        bad = {name: tensor for name, tensor in (good | change).items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message) as caught:
            layer.load_public(bad)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_model": 0}, "d_model to be an int >= 1"),
        ({"l_max": 0}, "l_max"),
        ({"l_max": 10.0}, "l_max"),
        ({"kernel_dim": 0}, "kernel_dim"),
        ({"kernel_dim": True}, "kernel_dim"),
        ({"n_scales": 0}, "n_scales"),
        ({"n_scales": 40}, "2\\^28"),
        ({"n_scales": 10**9}, "2\\^28"),
        ({"init_scale": -1}, "init_scale"),
        ({"channels": 0}, "channels"),
        ({"init": "cosine"}, "'randn', 'cos'"),
        ({"combine": "add"}, "'cat', 'sum'"),
        ({"interpolation": "cubic"}, "'linear', 'nearest'"),
        ({"alignment": "center"}, "'half_pixel', 'align_corners', 'drop_last', 'wrap'"),
        ({"interpolation": "nearest", "alignment": "wrap"}, "alignment 'half_pixel'"),
        ({"decay": "learnable"}, "'scale', 'power_fixed', 'power'"),
        ({"decay_min": 3.0}, "decay_min <= decay_max"),
        ({"decay_min": 0.0, "decay_max": 1.0}, "above 0"),
        ({"decay_max": float("inf")}, "finite"),
        ({"decay_max": 1e9, "n_scales": 8}, "2\\^60"),
        ({"activation": "sqrelu"}, "'gelu', 'relu'"),
        ({"postact": "gelu"}, "'glu'"),
        ({"dropout": 1.0}, "0 <= dropout < 1"),
        ({"recompute": "leyer"}, "none, pointwise, layer, block"),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        SGConv(**{"d_model": 4, "l_max": 32, **arguments})
    assert "\n" not in str(caught.value)


def test_misspelt_keywords_are_refused():
    with pytest.raises(TypeError, match="kernel_dims"):
        SGConv(4, 32, kernel_dims=8)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ArgumentError, match="set_recompute"):
        SGConv(4, 32).set_recompute("leyer")  # pyright: ignore[reportArgumentType]


def test_small_l_max_works():
    for l_max, kernel_dim in ((1, 64), (1, 1), (3, 64)):
        layer = SGConv(4, l_max, kernel_dim)
        assert layer.form.kernel.n_scales == 1
        for L in (1, 2, 200):
            layer(torch.randn(2, 4, L)).sum().backward()


def test_cosine_rows_are_permuted_cosines():
    torch.manual_seed(0)
    layer = SGConv(5, 64, 16, init="cos", bidirectional=True)
    rows = torch.stack([torch.cos(torch.linspace(0, 2 * torch.pi * i, 16)) for i in range(5)])
    orders = []
    for piece in layer.kernel_list:
        for half in piece:
            distance = torch.cdist(half.detach(), rows)
            assert distance.min(1).values.max() < 1e-5
            orders.append(tuple(distance.argmin(1).tolist()))
            assert sorted(orders[-1]) == list(range(5))
    assert len(set(orders)) > 1


def test_parameter_groups():
    model = nn.Sequential(nn.Linear(4, 4), SGConv(4, 32, 8), SGConv(4, 32, 8, decay="power", decay_min=1, decay_max=1))
    model[0].bias.requires_grad_(False)
    groups = parameter_groups(model, lr=0.01, weight_decay=0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [sorted(names[id(p)] for p in group["params"]) for group in groups]
    assert listed[1] == sorted(name for name in names.values() if "kernel_list" in name or name == "2.decay")
    assert listed[0] == sorted(set(names.values()) - set(listed[1]) - {"0.bias"})
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.01, 0.05), (0.001, 0.0)]
    assert parameter_groups(model, 0.01, 0.05, kernel_lr=0.002)[1]["lr"] == 0.002
    assert len(parameter_groups(nn.Linear(2, 2), 0.1)) == 1
    torch.optim.AdamW(groups)
