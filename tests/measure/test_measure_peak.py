"""The exact allocation peak of small chains against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.nn import functional as F

from lowtide.errors import UnsupportedError
from lowtide.measure import measure
from lowtide.measure.allocations import FORWARD, record
from lowtide.measure.call import Call

N = 1000
BYTES = 4 * N


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (N,), generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_forward_chain_holds_two_at_a_time() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.exp()  # the new one is made while the old one is alive
        return x

    with torch.no_grad():
        m = measure(chain, leaf(), repeats=1)
    assert (m.peak_bytes, m.after_forward_bytes, m.backward) == (2 * BYTES, BYTES, "none")


def test_in_place_chain_holds_one() -> None:
    with torch.no_grad():
        m = measure(lambda x: x.exp().sin_().cos_(), leaf(), repeats=1)
    assert m.peak_bytes == BYTES


def test_forward_and_backward() -> None:
    # the result, its gradient, and the gradient of x; the meter itself adds not a byte
    m = measure(lambda x: x.exp(), leaf(), repeats=1)
    assert (m.peak_bytes, m.after_forward_bytes, m.backward) == (3 * BYTES, BYTES, "from the result")
    # (x + 1) is kept by exp's successor; backward: cos(y) and its product with the gradient
    m = measure(lambda x: (x + 1).sin(), leaf(), repeats=1)
    assert m.peak_bytes == 5 * BYTES  # x + 1, result, its gradient, cos(x + 1), the product


def test_a_scalar_result_costs_scalars() -> None:
    # exp's result, the sum (4 bytes) and its gradient (4 bytes, expanded without a copy), the gradient of x
    assert measure(lambda x: x.exp().sum(), leaf(), repeats=1).peak_bytes == 2 * BYTES + 8


def test_fn_with_its_own_backward() -> None:
    x = leaf()

    def step() -> None:
        x.exp().backward(torch.ones(N))

    m = measure(step, repeats=3)
    assert (m.peak_bytes, m.backward) == (3 * BYTES, "inside fn")
    assert m.outside_autograd_bytes == 0, "the gradient of x is no hidden tensor"
    assert x.grad is None, "put back"


def test_temporaries_inside_an_operator_are_counted() -> None:
    # a float64 convolution copies every 3x3 patch into columns first: 9 times the input, unseen from Python
    n, c, s, k = 2, 3, 10, 4
    x, weight = torch.randn(n, c, s, s, dtype=torch.float64), torch.randn(k, c, 3, 3, dtype=torch.float64)
    m = measure(lambda: F.conv2d(x, weight), repeats=1)
    columns, result = n * c * 9 * (s - 2) ** 2 * 8, n * k * (s - 2) ** 2 * 8
    assert m.peak_bytes == columns + result
    assert m.after_forward_bytes == result


def test_blocks_from_before_are_not_counted() -> None:
    old = [torch.randn(N)]

    def replace() -> None:
        old[0] = torch.empty(2 * N)  # frees N numbers that were there before

    assert measure(replace, repeats=1).peak_bytes == 2 * BYTES


def test_blocks_of_an_earlier_measurement_are_not_counted() -> None:
    # torch's profiler still knows their size, and reports it when a later measurement sees them freed
    cache: list[Tensor] = []
    assert measure(lambda: cache.append(torch.empty(N)), repeats=1).outside_autograd_bytes == BYTES

    def replace() -> None:
        cache.clear()
        cache.append(torch.empty(3 * N))

    assert measure(replace, repeats=1).peak_bytes == 3 * BYTES


def test_peak_holders_name_module_operator_and_phase() -> None:
    net = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Flatten())
    m = measure(net, leaf(10, 100), repeats=1)
    assert [(h.nbytes, h.module, h.operator) for h in m.peak_holders] == [
        (BYTES, "0", "aten::tanh"),
        (BYTES, "", "ResultGradientBackward > aten::randn, in backward"),
        (BYTES, "0", "TanhBackward0 > aten::tanh_backward, in backward"),
    ]
    assert sum(h.nbytes for h in m.peak_holders) == m.peak_bytes


def test_instruments_do_not_change_the_peak() -> None:
    # the recorded run has hooks and module names on; the profiler alone must see the same bytes
    torch.manual_seed(0)
    conv, norm, head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 5)

    def step(x: Tensor) -> Tensor:
        h = F.dropout(norm(conv(x)).relu(), 0.3)
        h = torch.cat([h, h * h], 1)[:, 4:12]
        return head(h.mean((2, 3))).sum()

    x = torch.randn(4, 3, 16, 16)
    parameters = [*conv.parameters(), *norm.parameters(), *head.parameters()]
    measured = measure(step, x, repeats=1).peak_bytes
    call = Call(step, (x,), torch.device("cpu"))
    with record(torch.device("cpu")) as bare:
        with record_function(FORWARD):
            result = call.forward()
        call.backward(result)
    assert bare.trace.peak_bytes == measured
    assert measured > 4 * 8 * 16 * 16 * 4 * 5
    for p in parameters:
        p.grad = None


def test_timeline_reaches_the_peak_and_returns() -> None:
    m = measure(lambda x: x.exp(), leaf(), repeats=1)
    assert max(m.timeline.live_bytes) == m.peak_bytes
    assert m.timeline.live_bytes[-1] == BYTES, "the gradient of x outlives the call"
    assert 0 < m.timeline.forward_end_seconds <= m.timeline.peak_seconds


def test_long_timelines_are_thinned_without_losing_the_peak() -> None:
    def many(x: Tensor) -> Tensor:
        for i in range(6000):
            x = torch.empty(N + (i == 3456) * N)
        return x

    m = measure(many, leaf(), repeats=1)
    assert m.peak_bytes == 3 * BYTES  # the large one, while its small predecessor or successor is alive
    assert max(m.timeline.live_bytes) == m.peak_bytes
    assert len(m.timeline.live_bytes) <= 4001


def test_a_running_profiler_is_refused() -> None:
    with profile(acc_events=True), pytest.raises(UnsupportedError, match="a torch profiler is running"):
        measure(lambda x: x.exp(), leaf(), repeats=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks() -> None:
    n = 1 << 20
    x = torch.randn(n, device="cuda", requires_grad=True)
    m = measure(lambda t: t.exp(), x, repeats=3)
    assert m.cuda is not None
    assert m.saved_bytes == 4 * n
    assert m.cuda.requested_bytes == 3 * 4 * n  # the result, its gradient, the gradient of x
    assert m.cuda.requested_bytes <= m.cuda.allocated_bytes <= m.cuda.reserved_bytes
    assert m.peak_bytes == m.cuda.allocated_bytes
