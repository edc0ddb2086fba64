"""The parts of the prediction: native passes on fake tensors, quick answers, what operators take inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowtide.kernels import alike, select, shapes_only
from lowtide.kernels.native import NativeKernels
from lowtide.measure import measure
from lowtide.models import DenseNet
from lowtide.plan.inside import SMALL_BYTES, inside_bytes, operation
from lowtide.plan.parts import find_parts, uniform
from lowtide.plan.quick import _ELEMENTWISE, _FACTORIES, _IN_PLACE, _PLAIN, answer
from lowtide.plan.simulate import Simulation

aten = torch.ops.aten


class Account:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.weight, self.flops, self.moved = 1.0, 0.0, 0.0

    def add(self, flops: float, moved: float) -> None:
        self.flops += self.weight * flops
        self.moved += self.weight * moved


def test_fake_tensors_are_served_by_the_native_code_inside_shapes_only_alone() -> None:
    real = torch.zeros(2, 3, 4)
    if not isinstance(select(real), NativeKernels):
        pytest.fail("the native passes are not built here: this test needs a C++ compiler")
    with FakeTensorMode():
        fake = torch.empty(2, 3, 4)
        assert not isinstance(select(fake), NativeKernels)
        with shapes_only(Account()):
            assert isinstance(select(fake), NativeKernels)
    with shapes_only(Account()):
        assert type(select(real)) is NativeKernels


def test_a_native_pass_tells_its_operations_and_bytes() -> None:
    n, c, k, s = 2, 6, 4, 10
    account = Account()
    with FakeTensorMode(), shapes_only(account):
        x = torch.empty(n, s, c).transpose(1, 2)
        out = torch.empty(n, s, k).transpose(1, 2)
        vector = torch.empty(c)
        select(x).norm_act_mix(x, vector, vector, torch.empty(k, c), out)
    assert account.flops == 2 * n * s * c * k
    assert account.moved == 4 * n * s * (c + k)


def test_loops_of_tiles_alike_are_cut_and_weighted() -> None:
    account = Account()
    assert list(alike(range(9))) == list(range(9))
    with shapes_only(account):
        seen = []
        for tile in alike(range(9)):
            seen.append(tile)
            account.add(1.0, 0.0)
    assert seen == [0, 1, 8]
    assert account.flops == 1 + 7 + 1
    with shapes_only(account):
        assert [list(alike(range(n))) for n in range(5)] == [[], [0], [0, 1], [0, 1, 2], [0, 1, 3]]


def _cases() -> dict[Any, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]]:
    def maps(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.empty(shape).transpose(0, -1) for shape in shapes]

    square, same = (3, 5, 4), ((3, 5, 4), (3, 5, 4))
    one: dict[Any, tuple[Any, ...]] = {
        aten.slice.Tensor: (1, 1, 3), aten.select.int: (1, 2), aten.unsqueeze.default: (1,), aten.squeeze.dim: (1,),
        aten.transpose.int: (0, 1), aten.permute.default: ([2, 0, 1],), aten.expand.default: ([2, 4, 5, 3],),
        aten.detach.default: (), aten.alias.default: (), aten.unbind.int: (1,), aten.unfold.default: (1, 2, 1),
        aten.as_strided.default: ((3, 2), (4, 1)), aten.clone.default: (), aten.flip.default: ([1],),
        aten.sum.dim_IntList: ([0, 2],), aten.div.Scalar: (2.0,), aten.neg.default: (), aten.rsqrt.default: (),
        aten.pow.Tensor_Scalar: (2,), aten.zero_.default: (), aten.relu_.default: (), aten.conj_physical_.default: (),
        aten.zeros_like.default: (), aten.empty_like.default: (), aten.new_zeros.default: ([2, 3],),
        aten.new_empty.default: ([2, 3],),
    }  # fmt: skip
    cases: dict[Any, Any] = {f: (lambda a=a: (*maps(square), *a), {}) for f, a in one.items()}
    binary = (aten.add, aten.sub, aten.mul, aten.div)
    in_place = (aten.add_, aten.sub_, aten.mul_, aten.div_)
    cases |= {f.Tensor: (lambda: tuple(maps(*same)), {}) for f in (*binary, *in_place)}
    cases |= {
        aten.copy_.default: (lambda: tuple(maps(*same)), {}),
        aten.threshold_backward.default: (lambda: (*maps(*same), 0), {}),
        aten.mul.out: (lambda: tuple(maps(*same)), {"out": (3, 5, 4)}),
        aten.view.default: (lambda: (torch.empty(3, 8), [3, 2, 4]), {}),
        aten._unsafe_view.default: (lambda: (torch.empty(3, 8), [3, 2, 4]), {}),
        aten.t.default: (lambda: (torch.empty(3, 8),), {}),
        aten.mm.default: (lambda: (torch.empty(3, 8), torch.empty(8, 5)), {}),
        aten.bmm.default: (lambda: (torch.empty(2, 3, 8), torch.empty(2, 8, 5)), {}),
        aten.addmm.default: (lambda: (torch.empty(5), torch.empty(3, 8), torch.empty(8, 5)), {}),
        aten.baddbmm.default: (lambda: (torch.empty(2, 3, 5), torch.empty(2, 3, 8), torch.empty(2, 8, 5)), {}),
    }
    return cases


def test_every_quick_operator_has_a_case() -> None:
    assert set(_cases()) == _PLAIN | _ELEMENTWISE | _IN_PLACE | _FACTORIES


@pytest.mark.parametrize("func", sorted(_cases(), key=str), ids=str)
def test_quick_answers_have_the_form_of_real_ones(func: Any) -> None:
    make, options = _cases()[func]
    real_args = make()
    real_kwargs = {"out": torch.empty(options["out"]).transpose(0, -1)} if options else {}
    expected = func(*real_args, **real_kwargs)
    with FakeTensorMode() as mode:
        args = make()
        kwargs = {"out": torch.empty(options["out"]).transpose(0, -1)} if options else {}
    found = answer(mode, func, args, kwargs)
    pairs = list(zip(expected, found, strict=True)) if isinstance(expected, tuple | list) else [(expected, found)]
    for real, fake in pairs:
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape, real.stride(), real.dtype, real.device
        )  # fmt: skip
        shares = real.untyped_storage().data_ptr() == real_args[0].untyped_storage().data_ptr()
        assert (fake.untyped_storage()._cdata == args[0].untyped_storage()._cdata) == shares


@pytest.mark.parametrize("shapes", [((3, 1), (1, 4)), ((4,), (3, 4))], ids=str)
def test_quick_answers_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    with FakeTensorMode() as mode:
        args = tuple(torch.empty(shape) for shape in shapes)
    assert answer(mode, aten.add.Tensor, args, {}).shape == (3, 4)


def test_what_an_operator_takes_inside_is_continued_from_small_runs() -> None:
    # a float64 convolution makes the columns of one image at a time, or of all
    x, weight = torch.empty(64, 8, 48, 48, dtype=torch.float64), torch.empty(8, 8, 3, 3, dtype=torch.float64)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = operation(aten.convolution.default, args, {})
    assert call is not None
    assert call.nbytes > SMALL_BYTES / 2
    with torch.no_grad():
        measured = measure(lambda: aten.convolution.default(x.zero_(), weight.zero_(), *args[2:]), repeats=1).peak_bytes
    predicted = x.nbytes + inside_bytes(call)
    assert abs(predicted - measured) <= 0.02 * measured


def test_recomputation_is_counted_as_work() -> None:
    model = DenseNet(8, (3, 2), num_init_features=16)
    parts = find_parts(model)
    simulation = Simulation(model, (torch.empty(4, 3, 16, 16, device="meta"),), parts, None)
    flops = [
        sum(work.flops + work.fused for work in simulation.run(uniform(parts, level)).work.values())
        for level in ("pointwise", "layer", "block")
    ]
    # "layer" makes the bottlenecks again, 2 operations per weight and position; "block" the 3x3 convolutions too
    bottlenecks = [2 * 32 * (16 + 8 * i) * 4 * 256 for i in range(3)] + [2 * 32 * (20 + 8 * i) * 4 * 64 for i in (0, 1)]
    assert flops[1] - flops[0] == sum(bottlenecks)
    assert flops[2] - flops[1] >= 2 * 32 * 8 * 9 * 4 * (3 * 256 + 2 * 64)
