"""FSDP2 against one process that runs each rank's part by itself; checkpoints between numbers of ranks."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from launch import launch
from sharded_cases import LEVELS, NETWORKS, batch, build, resume, train_by_parts, train_sharded
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lowtide.distributed import load_sharded, save_sharded, shard
from lowtide.errors import ArgumentError, CheckpointError
from lowtide.nn import DenseBlock, DenseLayer, Transition


def all_networks(rank, world_size):
    return {(name, level): train_sharded(name, level, rank, world_size) for name in NETWORKS for level in LEVELS}


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    largest = max(float(v.norm()) for name, v in want.items() if "grad" in name)
    assert largest > 0
    scales = {name: largest if "grad" in name else max(float(v.norm()), 1e-3) for name, v in want.items()}
    return [name for name, v in want.items() if not float((got[name] - v).norm()) <= 1e-9 * scales[name]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_training_equals_parts_by_themselves(world_size):
    found = launch(all_networks, world_size)
    for name in NETWORKS:
        expected = train_by_parts(name, world_size)
        # each rank's own rows, its own statistics: the wrong rank's answer would not pass
        assert differences(expected[1], expected[0])
        for level in LEVELS:
            for rank in range(world_size):
                assert differences(found[rank][name, level], expected[rank]) == [], (name, level, rank)


def some_steps(rank, world_size, folder, steps, load, save):
    return {
        kind: resume(kind, folder, rank, world_size, range(*steps), load=load, save=save)
        for kind in ("sequence", "dense")
    }


def test_a_checkpoint_of_four_ranks_resumes_on_two_and_on_one(tmp_path):
    folder = str(tmp_path)
    uninterrupted = some_steps(0, 1, folder, (0, 6), False, False)
    first = launch(some_steps, 4, folder, (0, 3), False, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "sequence"]
    two = launch(some_steps, 2, folder, (3, 6), True, False)
    one = some_steps(0, 1, folder, (3, 6), True, False)
    for kind, losses in uninterrupted.items():
        assert len(set(losses)) == 6
        for rank in first:
            assert rank[kind] == pytest.approx(losses[:3], rel=1e-9)
        for rank in (*two, one):
            assert rank[kind] == pytest.approx(losses[3:], rel=1e-9)
    for part in ("model", "optimizer"):

        def without(content, part=part, load=checkpoint.load, **keywords):
            load({name: state for name, state in content.items() if name != part}, **keywords)

        with mock.patch.object(checkpoint, "load", without):
            forgotten = some_steps(0, 1, folder, (3, 6), True, False)
        for kind, losses in uninterrupted.items():
            assert forgotten[kind] != pytest.approx(losses[3:], rel=1e-6)


def by_hand(*kinds):
    """Shard every module of some kinds by itself, as somebody would who does not know of units."""

    def divide(model):
        for module in model.modules():
            if isinstance(module, kinds):
                fully_shard(module)
        fully_shard(model)

    return divide


def summed(model):
    """The planted fault: gradients of the ranks are added, not averaged."""
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def other_ways(rank, world_size):
    name = NETWORKS[0]
    wrong = train_sharded(name, "layer", rank, world_size, summed)
    by_blocks = train_sharded(name, "block", rank, world_size, by_hand(DenseBlock, Transition))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_layers = train_sharded(name, "layer", rank, world_size, by_hand(DenseLayer))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x, _ = batch(NETWORKS[3], 0)
    half = {}
    for level in ("none", "pointwise", "layer", "block"):
        model = shard(build(NETWORKS[3]).float(), mp_policy=policy)
        model.set_recompute(level)
        y = model(x)
        y.square().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        half[level] = y.detach()
    with pytest.raises(ArgumentError, match="units="):
        shard(nn.Linear(2, 2))
    return by_blocks, by_layers, [str(w.message) for w in caught], half, wrong


def test_sharding_by_hand_and_in_bfloat16():
    expected = train_by_parts(NETWORKS[0], 2)
    exact = build(NETWORKS[3])(batch(NETWORKS[3], 0)[0])
    for rank, (by_blocks, by_layers, said, half, wrong) in enumerate(launch(other_ways, 2)):
        assert differences(wrong, expected[rank])
        assert differences(by_blocks, expected[rank]) == []
        assert differences(by_layers, expected[rank]) == []
        plain_way = [words for words in said if "runs in ordinary autograd" in words]
        assert len(plain_way) == 3  # once per block
        assert "denselayer1 has a hook" in plain_way[0]
        scale = exact.norm()
        allowed = 2 * (half["none"].double() - exact).norm() + 4 * torch.finfo(torch.bfloat16).eps * scale
        assert allowed < 0.5 * scale
        for level, y in half.items():
            assert (y.double() - exact).norm() <= allowed, level


def test_checkpoints_that_do_not_fit(tmp_path):
    def pair(name):
        model = build(name)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        load_sharded(tmp_path / "none", *pair(NETWORKS[2]))
    save_sharded(tmp_path / "one", *pair(NETWORKS[2]), step=1)
    save_sharded(tmp_path / "one", *pair(NETWORKS[2]), step=2)  # in place of the first
    assert load_sharded(tmp_path / "one", *pair(NETWORKS[2])) == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    model, optimizer = pair(NETWORKS[3])
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="a checkpoint of this model"):
        load_sharded(tmp_path / "one", model, optimizer)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="can be written"):
        save_sharded(blocked / "inside", *pair(NETWORKS[2]))
