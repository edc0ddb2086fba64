"""The lean long convolution: values, gradients, memory and refusals."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sgconv_compare import assert_as_exact, assert_near, gradients
from sgconv_direct import direct_long_conv
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import ArgumentError
from lowtide.functional import long_conv
from lowtide.lean import fft_frames
from lowtide.lean.fft_sizes import fast_length
from lowtide.measure import measure


def make(L: int, K: int, *, C: int | None = None, R: int | None = None, B: int = 2, H: int = 3, seed: int = 0):
    """u, k, skip, k_reverse in float64, all wanting gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    lead = (H,) if C is None else (C, H)
    return draw(B, H, L), draw(*lead, K), draw(*lead), None if R is None else draw(*lead, R)


@pytest.fixture
def save_everywhere(monkeypatch):
    """Overlap-save even for the shortest sequences, with frames as small as can be."""
    monkeypatch.setattr(fft_frames, "SAVE_LENGTH", 2)
    monkeypatch.setattr(fft_frames, "SAVE_SAMPLES", 100.0)

    def small_frame(L: int, overlap: int) -> tuple[int, int]:
        N = fast_length(2 * (overlap + 1))
        return N, N - overlap

    monkeypatch.setattr(fft_frames, "best_frame", small_frame)


def check_against_sum(L, K, R, C, tile_bytes):
    u, k, skip, k_reverse = make(L, K, C=C, R=R)
    inputs = [x for x in (u, k, skip, k_reverse) if x is not None]
    want = direct_long_conv(u, k, skip, k_reverse)
    got = long_conv(u, k, skip, k_reverse=k_reverse, tile_bytes=tile_bytes)
    assert_near(got, want, 1e-13, "y")
    for x, a, b in zip(inputs, gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, x=x: f"{tuple(x.shape)}: {m}")


@pytest.mark.parametrize("L", [1, 2, 3, 5, 7, 17, 40])
@pytest.mark.parametrize(("K", "R"), [(1, None), (3, 2), (2, 50), (60, None), (7, 7), (40, 40), (5, 1)])
@pytest.mark.parametrize("C", [None, 1, 2])
@pytest.mark.parametrize("tile_bytes", [None, 1, 700])
def test_equals_the_sum_written_out(L, K, R, C, tile_bytes):
    check_against_sum(L, K, R, C, tile_bytes)


@pytest.mark.parametrize("L", [25, 40, 61])
@pytest.mark.parametrize(("K", "R"), [(1, None), (1, 1), (3, 2), (2, 5), (7, 7)])
@pytest.mark.parametrize("C", [None, 2])
@pytest.mark.parametrize("tile_bytes", [1, 900, 5000])
def test_overlap_save_equals_the_sum_written_out(save_everywhere, L, K, R, C, tile_bytes):
    plan = fft_frames.Frames.plan(torch.empty(2, 3, L), C or 1, K, R or 0, torch.float64, tile_bytes)
    assert plan.hop < L
    check_against_sum(L, K, R, C, tile_bytes)


@pytest.mark.parametrize("L", [127, 1009, 4095, 4096, 4097, 65537])
def test_long_lengths_against_the_plain_form_in_float64(L):
    u, k, skip, k_reverse = make(L, L, R=L, B=1, H=2)
    inputs = [u, k, skip, k_reverse]
    want = long_conv(u, k, skip, k_reverse=k_reverse, recompute="none")
    got = long_conv(u, k, skip, k_reverse=k_reverse)
    assert_near(got, want, 1e-13, "y")
    for a, b in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert_near(a, b, 1e-12)


def test_an_impulse_at_the_end_does_not_wrap_around():
    L = 1000
    u = torch.zeros(1, 2, L)
    u[..., -1] = 1.0
    k = torch.randn(2, L, generator=torch.Generator().manual_seed(0))
    y = long_conv(u, k)
    assert y[..., :-1].abs().max() < 1e-5
    assert_near(y[0, :, -1], k[:, 0], 1e-5)
    back = long_conv(u.flip(-1), k, k_reverse=k)  # the reverse tap of lag -L would land on output L-1
    assert_near(back[0], k, 1e-6)


@pytest.mark.parametrize("features", [1, 3, 7, 8])
def test_tile_sizes_agree(features):
    u, k, skip, k_reverse = make(50, 50, R=50, B=2, H=7)
    inputs = [u, k, skip, k_reverse]
    want = long_conv(u, k, skip, k_reverse=k_reverse, recompute="none")
    got = long_conv(u, k, skip, k_reverse=k_reverse, tile_bytes=features * 2 * fast_length(99) * 8)
    plan = fft_frames.Frames.plan(u, 1, 50, 50, torch.float64, features * 2 * fast_length(99) * 8)
    assert plan.feature_tile == min(features, 7)
    assert_near(got, want, 1e-13)
    for a, b in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert_near(a, b, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [7, 300, 4097])
def test_low_precision_is_as_exact_as_the_plain_form(dtype, L):
    wide = [x.detach() for x in make(L, L, R=L, C=2, B=2, H=3)]
    narrow = [x.to(dtype).requires_grad_() for x in wide]
    oracle_inputs = [x.detach().double().requires_grad_() for x in narrow]
    results = {}
    for name, (u, k, skip, k_reverse), level in (
        ("oracle", oracle_inputs, "none"),
        ("plain", narrow, "none"),
        ("ours", narrow, "pointwise"),
    ):
        y = long_conv(u, k / L**0.5, skip, k_reverse=k_reverse / L**0.5, recompute=level)
        assert y.dtype == u.dtype
        results[name] = [y, *gradients(y, [u, k, skip, k_reverse])]
    for what, ours, plain, oracle in zip(
        ("y", "du", "dk", "dskip", "dk_reverse"), results["ours"], results["plain"], results["oracle"], strict=True
    ):
        assert_as_exact(ours, plain, oracle, what)


@pytest.mark.parametrize("L", [65536, 1_000_000])
def test_float32_gradients_of_long_sequences(L):
    u, k, skip, k_reverse = make(L, L, R=L, B=1, H=2 if L < 100_000 else 1)
    scaled = [u.detach(), k.detach() / L**0.5, skip.detach(), k_reverse.detach() / L**0.5]
    results = []
    for dtype, level in ((torch.float64, "none"), (torch.float32, "layer")):
        a = [x.to(torch.float32).to(dtype).requires_grad_() for x in scaled]
        y = long_conv(a[0], a[1], a[2], k_reverse=a[3], recompute=level)
        results.append([y, *gradients(y, a)])
    for what, want, got in zip(("y", "du", "dk", "dskip", "dk_reverse"), *results, strict=True):
        assert_near(got, want, 1e-6, what)


def test_strided_expanded_and_empty_inputs():
    u, k, skip, _ = make(24, 10, B=3)
    want = long_conv(u, k, skip, recompute="none")
    strided = u.detach().transpose(1, 2).contiguous().transpose(1, 2)
    every_other = torch.stack([k.detach(), k.detach()], -1).flatten(-2)[..., ::2]
    assert_near(long_conv(strided, every_other, skip), want, 1e-13)
    one = u.detach()[:1].expand(3, -1, -1).requires_grad_()
    assert_near(long_conv(one, k), long_conv(one.contiguous(), k, recompute="none"), 1e-13)
    dy = torch.ones(()).double().expand(3, 3, 24)
    (got,) = torch.autograd.grad(long_conv(one, k), one, dy)
    assert_near(got, torch.autograd.grad(long_conv(one, k, recompute="none"), one, dy)[0], 1e-12)
    for level in ("none", "layer"):
        empty = torch.zeros(0, 3, 24, dtype=torch.float64, requires_grad=True)
        y = long_conv(empty, k, skip, recompute=level)
        assert y.shape == (0, 3, 24)
        du, dk = torch.autograd.grad(y.sum(), [empty, k])
        assert du.shape == empty.shape
        assert not dk.any()
        assert long_conv(u[..., :0], k, recompute=level).shape == (3, 3, 0)
        assert not long_conv(u, k[:, :0], recompute=level).any()


def test_a_kernel_longer_than_the_input_gets_zero_gradient_past_it():
    u, k, _, k_reverse = make(10, 25, R=30)
    _, dk, dk_reverse = gradients(long_conv(u, k, k_reverse=k_reverse), [u, k, k_reverse])
    assert dk[:, :10].any()
    assert not dk[:, 10:].any()
    assert dk_reverse[:, :9].any()
    assert not dk_reverse[:, 9:].any()


class CountTransforms(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wanted", "forward", "inverse"),
    [("u", 2, 1), ("k", 2, 1), ("uk", 3, 2)],  # du: k and dy; dk: u and dy; both: one transform of dy
)
def test_only_the_gradients_that_are_needed_are_computed(wanted, forward, inverse):
    u, k, _, _ = make(64, 64)
    u.requires_grad_("u" in wanted)
    k.requires_grad_("k" in wanted)
    y = long_conv(u, k)
    with CountTransforms() as seen:
        y.sum().backward()
    assert seen.calls["_fft_r2c"] == forward
    assert seen.calls["_fft_c2r"] == inverse
    assert (u.grad is None, k.grad is None) == ("u" not in wanted, "k" not in wanted)


def test_only_u_and_the_kernel_are_kept():
    B, H, L = 4, 8, 512
    u = torch.randn(B, H, L, requires_grad=True)
    k = torch.randn(H, L, requires_grad=True)
    assert measure(lambda u, k: long_conv(u, k), u, k, repeats=1).saved_bytes == (B * H * L + H * L) * 4
    assert measure(lambda u, k: long_conv(u, k, recompute="none"), u, k, repeats=1).saved_bytes > 4 * B * H * L * 4


@pytest.mark.parametrize(("K", "R"), [(50_000, 0), (64, 0), (64, 64)])
def test_peak_is_y_and_the_gradients_and_a_few_tiles(K, R):
    """Allocated over the inputs: y, du, dk, and at most nine buffers of tile_bytes or of one row per thread."""
    B, H, L = 1, 32, 50_000
    u = torch.randn(B, H, L, requires_grad=True)
    k = torch.randn(H, K, requires_grad=True)
    k_reverse = torch.randn(H, R, requires_grad=True) if R else None
    plan = fft_frames.Frames.plan(u, 1, K, R, torch.float32, None)
    rows = plan.batch_tile * plan.feature_tile * plan.frame_tile
    buffer = (rows + 1) * (plan.N + 2) * 4
    step = measure(lambda u, k: long_conv(u, k, k_reverse=k_reverse), u, k, repeats=1)
    results = (3 * B * H * L + H * (K + R)) * 4  # y, its gradient, du, dk
    assert step.peak_bytes <= results + 9 * buffer
    if K < L:
        assert plan.hop < L
        assert buffer < B * H * L * 4


def test_double_backward_is_supported():
    for L, K, R, C in ((5, 3, None, None), (4, 6, 7, None), (6, 4, 3, 2), (3, 5, 1, 2)):
        u, k, skip, k_reverse = make(L, K, R=R, C=C, B=2, H=2)
        inputs = [x for x in (u, k, skip, k_reverse) if x is not None]

        def function(u, k, skip, k_reverse=None):
            return long_conv(u, k, skip, k_reverse=k_reverse)

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_gradcheck_exact_causal():
    u, k, skip, _ = make(37, 5, B=1, H=1)
    assert torch.autograd.gradcheck(lambda *a: long_conv(*a, exact_causal=True), [u, k, skip])
    u, k, skip, _ = make(5, 7, C=2)
    assert torch.autograd.gradgradcheck(lambda *a: long_conv(*a, exact_causal=True), [u, k, skip])


@pytest.mark.parametrize("level", ["none", "layer"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(("L", "at"), [(300, 150), (300, 0), (64, 63), (97, 31)])
def test_exact_causal_confines_bad_samples_to_the_present_and_future(level, poison, L, at):
    u, k, skip, _ = (None if x is None else x.detach().float() for x in make(L, L, C=2))
    clean = long_conv(u, k, skip, exact_causal=True, recompute=level)
    bad = u.clone()
    bad[..., at] = poison
    y = long_conv(bad, k, skip, exact_causal=True, recompute=level)
    assert torch.equal(y[..., :at], clean[..., :at])
    assert not torch.equal(y[..., at], clean[..., at])
    if at:
        spoilt = long_conv(bad, k, skip, recompute=level)[..., :at]
        assert not torch.allclose(spoilt, clean[..., :at])  # what one transform of everything does
    if level == "layer":
        u.requires_grad_()
        dy = torch.ones_like(y)
        (good,) = torch.autograd.grad(long_conv(u, k, exact_causal=True), u, dy)
        dy[..., at] = poison
        (du,) = torch.autograd.grad(long_conv(u, k, exact_causal=True), u, dy)
        assert torch.equal(du[..., at + 1 :], good[..., at + 1 :])


def test_five_hundred_lengths_leave_no_trace():
    """What python holds after many calls is what it held after a few: no plan, buffer or spectrum is remembered."""
    import gc

    from torch import Tensor

    def live() -> int:
        gc.collect()
        return sum(1 for x in gc.get_objects() if issubclass(type(x), Tensor))

    lengths = torch.randint(1, 3000, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    k = torch.randn(1, 3000, requires_grad=True)

    def call(L: int) -> None:
        long_conv(torch.randn(1, 1, L, requires_grad=True), k).sum().backward()

    for L in lengths[:20]:
        call(L)
    before, resident = live(), _resident_bytes()
    for L in lengths * 4:
        call(L)
    assert live() == before
    # 2,000 kept spectra of the mean length would be 24 MB
    assert _resident_bytes() - resident < 8 * 2**20


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_fast_length_is_the_smallest_of_its_kind():
    def smooth(n: int, unit: int) -> bool:
        if n % unit:
            return False
        n //= unit
        for p in (2, 3, 5):
            while n % p == 0:
                n //= p
        return n == 1

    for least in (*range(1, 1200), 4097, 65537, 99_991):
        unit = 2 if least < 512 else 32
        assert fast_length(least) == next(n for n in range(least, 3 * least + 64) if smooth(n, unit))
    primes = (1009, 65_537, 1_000_003)
    assert all(fast_length(p) <= 1.06 * p for p in primes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 3)}, r"u \(B, H, L\)"),
        ({"u": torch.zeros(2, 3, 8, dtype=torch.int64)}, "floating"),
        ({"k": torch.zeros(4, 8)}, r"k \(3, K\) or \(C, 3, K\)"),
        ({"k": torch.zeros(2, 2, 3, 8)}, r"k \(3, K\)"),
        ({"skip": torch.zeros(2, 3)}, r"skip \(3\)"),
        ({"k_reverse": torch.zeros(2, 3, 8)}, "k_reverse"),
        ({"recompute": "leyer"}, "none, pointwise, layer, block"),
        ({"exact_causal": True, "k_reverse": torch.zeros(3, 8)}, "causal kernel alone"),
        ({"tile_bytes": 0}, "tile_bytes >= 1"),
    ],
)
def test_refusals_are_one_line(change, message):
    arguments = {"u": torch.zeros(2, 3, 8), "k": torch.zeros(3, 8)} | change
    with pytest.raises(ArgumentError, match=message) as caught:
        long_conv(**arguments)
    assert "\n" not in str(caught.value)
