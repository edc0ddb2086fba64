"""Sequence parallel training: what goes over the wire, what is kept, float32, meshes, refusals; and planted faults."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from launch import launch
from sequence_cases import CASES, Case, build, cut, inputs, join, train
from test_sequence import differences
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowtide.distributed import gather_sequence, reduce_gradients, sequence_parallel, shard, split_sequence
from lowtide.distributed.exchange import GroupSplit, shares
from lowtide.distributed.sequence import Ranks
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.lean import sgconv as lean_layer
from lowtide.models import SequenceModel
from lowtide.nn import SGConv


class Counted:
    """Bytes that this rank sends to others by all-to-all, and the sizes of the other collectives' messages."""

    def __init__(self) -> None:
        self.exchanged = self.messages = 0

    @contextlib.contextmanager
    def watch(self):
        exchange = distributed.all_to_all_single

        def all_to_all_single(got, sent, sizes_got, sizes, group=None):
            self.exchanged += (sum(sizes) - sizes[distributed.get_rank(group)]) * sent.element_size()
            return exchange(got, sent, sizes_got, sizes, group=group)

        def counting(function, argument):
            def call(*args, **keywords):
                self.messages += args[argument].numel() * args[argument].element_size()
                return function(*args, **keywords)

            return call

        with (
            mock.patch.object(distributed, "all_to_all_single", all_to_all_single),
            mock.patch.object(distributed, "all_reduce", counting(distributed.all_reduce, 0)),
            mock.patch.object(distributed, "broadcast", counting(distributed.broadcast, 0)),
            mock.patch.object(distributed, "all_gather", counting(distributed.all_gather, 1)),
        ):
            yield self


def traffic_and_kept(rank, world_size):
    """(got, expected) per level: bytes exchanged and bytes of other messages in a step; bytes kept by a layer."""
    B, L, H, C, layers = 2, 26, 6, 2, 2
    found = {}
    for level in ("none", "pointwise", "layer", "block"):
        model = SequenceModel(
            3, 4, H, layers, 40, kernel_dim=4, channels=C, bidirectional=True, dropout=0.2, pool="mean", recompute=level
        )
        sequence_parallel(model)
        x = split_sequence(torch.randn(B, L, 3))
        with Counted().watch() as counted:
            model(x).sum().backward()
            reduce_gradients(model)
        T, h = x.shape[1], shares(H, world_size)[rank].stop - shares(H, world_size)[rank].start
        there, back = (H - h) * T, h * (L - T)  # one kernel's numbers: positions out, channels out
        forward = there + C * back
        repeated = {"none": 0, "pointwise": 0, "layer": C * back, "block": forward + C * back}[level]
        exchanged = layers * B * 4 * (forward + repeated + C * there + back)
        runs = 2 if level == "block" else 1
        norms = (layers * runs + 1) * 8 * (2 * H + 1) + (layers + 1) * 8 * 2 * H
        masks = layers * runs * B * C * H
        numbers = sum(p.numel() + 1 for p in model.parameters()) * 4
        messages = 3 * 8 + norms + masks + 2 * B * H * 4 + numbers
        found[level] = (counted.exchanged, exchanged, counted.messages, messages)
    kept = {}
    for level in ("pointwise", "layer"):
        layer = sequence_parallel(SGConv(H, L, kernel_dim=4, channels=C, bidirectional=True, recompute=level))
        u = split_sequence(torch.randn(B, H, L), dim=2).clone().requires_grad_()
        own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved, own=own):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(u)
        share, T = shares(H, world_size)[rank], u.shape[2]
        expected = B * (share.stop - share.start) * L * 4 + (B * C * H * T * 4 if level == "pointwise" else 0)
        kept[level] = (sum(saved.values()), expected)
        y.sum().backward()
    # kernels, forward and reverse, of this rank's features alone
    made: list[int] = []

    def build(pieces, *rest, original=lean_layer.build):
        made.append(pieces[0].shape[1])
        return original(pieces, *rest)

    with mock.patch.object(lean_layer, "build", build), torch.no_grad():
        layer(u)
    kept["kernels"] = (sum(made), 2 * (share.stop - share.start))
    assert not any(b.dtype == torch.bool for b in (*model.buffers(), *layer.buffers()))
    return found, kept


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_and_kept_are_those_of_the_formula(world_size):
    for found, kept in launch(traffic_and_kept, world_size):
        for level, (exchanged, formula, messages, their_formula) in found.items():
            assert exchanged == formula > 0, level
            assert messages == their_formula > 0, level
        for what, (got, formula) in kept.items():
            assert got == formula > 0, what


def helpers(rank, world_size):
    """Splitting and gathering, DTensor, meshes, refusals; asserted on every rank."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sequence",))
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0))
    part = split_sequence(x, mesh)
    assert torch.equal(part, distribute_tensor(x, mesh, [Shard(1)]).to_local())
    assert part.shape[1] == (3, 3, 3, 0)[rank]
    part = part.clone().requires_grad_()
    whole = gather_sequence(part, mesh)
    assert torch.equal(whole, x)
    (whole * x).sum().backward()
    assert torch.equal(part.grad, split_sequence(x, mesh))
    assert torch.equal(gather_sequence(split_sequence(x.transpose(0, 1), dim=0), dim=0), x.transpose(0, 1))

    model = sequence_parallel(SequenceModel(3, 5, 6, 1, 9, kernel_dim=2, pool=None), mesh)
    y = DTensor.from_local(
        model(distribute_tensor(x, mesh, [Shard(1)]).to_local()), mesh, [Shard(1)], shape=(2, 9, 5), stride=(45, 5, 1)
    )
    assert torch.equal(y.full_tensor(), gather_sequence(model(split_sequence(x, mesh)), mesh))

    # dropout of single numbers: other masks on other ranks, the same at every level
    torch.manual_seed(5)
    layer = sequence_parallel(SGConv(4, 8, kernel_dim=2, dropout=0.5, transposed=False).double())
    u = torch.ones(1, 8, 4, dtype=torch.float64)
    seen = []
    for level in ("none", "pointwise", "layer"):
        layer.set_recompute(level)
        torch.manual_seed(9)
        own = split_sequence(u).clone().requires_grad_()
        out = layer(own)
        gather_sequence(out).square().sum().backward()
        seen.append((out.detach(), own.grad))
        torch.testing.assert_close(seen[-1], seen[0], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        layer.output_linear.weight.copy_(torch.eye(4))
        layer.output_linear.bias.zero_()
        zeros = gather_sequence(layer(split_sequence(u))) == 0
    assert 3 < int(zeros.sum()) < 29
    assert not torch.equal(zeros[:, :2], zeros[:, 2:4])

    # a frozen parameter and one without gradient keep none
    model.encoder.weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model(split_sequence(x)).sum().backward()
    reduce_gradients(model)
    assert model.encoder.weight.grad is None
    assert model.unused.grad is None
    assert model.encoder.bias.grad.abs().sum() > 0

    refusals = [
        (ArgumentError, "SGConv layers", lambda: sequence_parallel(nn.Linear(2, 2))),
        (ArgumentError, "call sequence_parallel", lambda: reduce_gradients(SGConv(2, 4))),
        (UnsupportedError, "1: GroupNorm", lambda: sequence_parallel(nn.Sequential(SGConv(2, 4), nn.GroupNorm(1, 2)))),
        (UnsupportedError, "Conv1d", lambda: sequence_parallel(nn.Sequential(SGConv(2, 4), nn.Conv1d(2, 2, 3)))),
        (UnsupportedError, "split over the ranks", lambda: pickle.dumps(model)),
        (ArgumentError, "batches of", lambda: model(torch.zeros(1 + rank, 2, 3))),
        (ArgumentError, "the same lengths", lambda: model(x[:, :2], torch.tensor([2, 2 + rank]))),
        (ArgumentError, "more than 1 position", lambda: model(x[:, :2], torch.tensor([0, 1]))),
        (ArgumentError, "length of at least 1", lambda: sequence_parallel(SGConv(2, 4))(torch.zeros(1, 2, 0))),
    ]
    for kind, words, call in refusals:
        with pytest.raises(kind, match=words):
            call()
    return True


def data_and_sequence(rank, world_size):
    """Rows over one dimension of a mesh (DDP, FSDP), positions over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    with pytest.raises(ArgumentError, match="one dimension"):
        sequence_parallel(SGConv(2, 4), mesh)
    model = sequence_parallel(build(CASES[0], seed=rank), mesh["sequence"])
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())
    x = inputs(replace(CASES[0], B=4), 0)
    rows = x.chunk(2)[mesh["data"].get_local_rank()]
    wrapped(split_sequence(rows, mesh["sequence"])).square().sum().backward()
    reduce_gradients(model)
    sharded = sequence_parallel(build(CASES[0], seed=rank), mesh["sequence"])
    sharded.load_state_dict(model.state_dict())
    shard(sharded, mesh["data"])
    sharded.set_recompute("block")
    sharded(split_sequence(rows, mesh["sequence"])).square().sum().backward()
    reduce_gradients(sharded)
    by_ddp = {n: p.grad for n, p in model.named_parameters()}
    return by_ddp, {n: p.grad.full_tensor() for n, p in sharded.named_parameters()}, model.state_dict()


def helpers_and_mesh(rank, world_size):
    return helpers(rank, world_size), data_and_sequence(rank, world_size)


def test_helpers_meshes_and_refusals():
    found = launch(helpers_and_mesh, 4)
    _, (_, _, weights) = found[0]
    model = build(CASES[0])
    model.load_state_dict(weights)
    for rows in inputs(replace(CASES[0], B=4), 0).chunk(2):
        model(rows).square().sum().div(2).backward()
    expected = {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    for _, (by_ddp, by_shards, _) in found:
        for gradients in (by_ddp, by_shards):
            assert differences({f"{n}.grad": g for n, g in gradients.items()}, expected, 1e-9) == []


def in_float32(rank, world_size):
    case = CASES[0]
    found = train(case, "pointwise", rank, world_size, torch.float32)
    model = sequence_parallel(build(case, torch.float32))
    x = cut(inputs(case, 0, torch.float32), case, rank, world_size, 1)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    return found, y.detach()


def test_float32_and_autocast_by_the_rule():
    """error(ranks) <= 2 error(one process) + 4 eps scale against float64."""
    case = CASES[0]
    found = launch(in_float32, 2)
    ours = join([f for f, _ in found], case)
    plain, oracle = train(case, "none", dtype=torch.float32), train(case, "none")
    largest = max(float(v.norm()) for name, v in oracle.items() if "grad0" in name)
    names = [name for name in oracle if name in ("y0",) or "grad0" in name]
    assert len(names) > 10
    for name in names:
        scale = largest if "grad" in name else float(oracle[name].norm())
        allowed = 2 * float((plain[name].double() - oracle[name]).norm()) + 4 * torch.finfo(torch.float32).eps * scale
        assert allowed < 0.01 * scale
        assert float((ours[name].double() - oracle[name]).norm()) <= allowed, name
    model = build(case, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain_y = model(inputs(case, 0, torch.float32)).double()
    exact = oracle["y0"]
    allowed = 2 * (plain_y - exact).norm() + 4 * torch.finfo(torch.bfloat16).eps * exact.norm()
    assert allowed < 0.2 * exact.norm()
    assert (found[0][1].double() - exact).norm() <= allowed


def without_sum(split: GroupSplit, vector: Tensor) -> None:
    """Statistics of this rank's positions alone."""


def without_reverse_across_ranks(u_BHL, kernels, call):
    plan = plan_of(u_BHL, kernels, call)
    return replace(plan, R=min(plan.R, 3))


def with_wrong_kernels(split, H, row_bytes):
    parts = parts_of(split, H, row_bytes)
    return [replace(part, own=part.of_rank[split.ranks - 1 - split.rank]) for part in parts]


plan_of, parts_of = lean_layer._plan, GroupSplit.parts
FAULTS = {
    "a sum left out": lambda: mock.patch.object(GroupSplit, "add_", without_sum),
    "positions counted from zero on every rank": lambda: mock.patch.object(GroupSplit, "offset", 0),
    "kernels of another rank's channels": lambda: mock.patch.object(GroupSplit, "parts", with_wrong_kernels),
    "reverse kernel cut at the rank's end": lambda: mock.patch.object(
        lean_layer, "_plan", without_reverse_across_ranks
    ),
    "the output counted once per rank": lambda: mock.patch.object(GroupSplit, "replicated", lambda self, y: y),
    "pooling without its share in the backward": lambda: mock.patch(
        "lowtide.distributed.exchange._Sum.backward", staticmethod(lambda ctx, *grads: (grads[0], None))
    ),
    "weights of different seeds": lambda: mock.patch.object(distributed, "broadcast"),
    "positions in the wrong order": lambda: mock.patch.object(
        GroupSplit, "_times", property(lambda self: shares(self.length, self.ranks)[::-1])
    ),
}
FAULTY = Case(
    "fault", 16, {"bidirectional": True, "d_model": 4, "pool": "mean"}, (16, 5, 11), levels=("pointwise",)
)  # fmt: skip


def with_faults(rank, world_size):
    found = {"none": train(FAULTY, "pointwise", rank, world_size)}
    for name, fault in FAULTS.items():
        with fault():
            found[name] = train(FAULTY, "pointwise", rank, world_size)
    with mock.patch("sequence_cases.reduce_gradients"):
        found["gradients not reduced"] = train(FAULTY, "pointwise", rank, world_size)
    return found


def test_planted_faults_are_seen():
    expected = train(FAULTY, "none")
    found = launch(with_faults, 2)
    for name in found[0]:
        parts = [rank[name] for rank in found]
        alike = all(torch.equal(parts[0][n], parts[1][n]) for n in parts[0] if not n.startswith("part "))
        seen = not alike or bool(differences(join(parts, FAULTY), expected, 1e-9))
        assert seen is (name != "none"), name


def test_without_a_process_group():
    with pytest.raises(UnsupportedError, match="torchrun"):
        sequence_parallel(SGConv(2, 4))
    assert Ranks(None) == Ranks(None)
