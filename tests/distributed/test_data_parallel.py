"""Two and four ranks against one process: losses, gradients, buffers, eval output, and the bytes that were sent."""

from __future__ import annotations

import re

import pytest
import torch
from data_parallel_cases import LEVELS, Case, Seen, alone, build, on_ranks, planted
from launch import launch

from lowtide.distributed.data_parallel import check_equal
from lowtide.distributed.world import World
from lowtide.errors import RankError
from lowtide.models import DenseNet, SequenceModel

DDP = {
    f"static_graph={static} find_unused={find}": {"static_graph": static, "find_unused_parameters": find}
    for static in (False, True)
    for find in (False, True)
}
CASES = [
    *(Case(f"dense {level}", "dense", level) for level in LEVELS),
    *(Case(f"dense sync {level}", "dense", level, sync="lowtide") for level in LEVELS),
    *(Case(f"dense torch's sync {level}", "dense", level, sync="torch") for level in LEVELS),
    *(Case(f"sequence sync {level}", "sequence", level, sync="lowtide") for level in LEVELS),
    Case("sequence", "sequence"),
    Case("sequence torch's sync", "sequence", "layer", sync="torch"),
    Case("stem sync", "stem", sync="lowtide"),
    Case("stem sync layer", "stem", "layer", sync="lowtide"),
    Case("stem torch's sync none", "stem", "none", sync="torch"),
    Case("torchvision sync", "torchvision", sync="lowtide"),
    Case("torchvision sync layer", "torchvision", "layer", sync="lowtide"),
    Case("torchvision torch's sync", "torchvision", sync="torch"),
    Case("plain layers sync", "plain layers", "layer", sync="lowtide"),
    Case("accumulated", "dense", batch=19, accumulate=2),
    Case("accumulated sync", "dense", batch=19, accumulate=2, sync="lowtide"),
    *(Case(f"{name}", "dense", ddp=settings) for name, settings in DDP.items()),
    *(Case(f"accumulated {name}", "dense", batch=19, accumulate=2, ddp=settings) for name, settings in DDP.items()),
    *(
        Case(f"unused {name}", "dense", unused=True, ddp=settings)
        for name, settings in DDP.items()
        if settings["static_graph"] or settings["find_unused_parameters"]
    ),
]
FEW = ("dense pointwise", "dense sync layer", "sequence sync layer", "stem sync", "accumulated sync")


def all_cases(rank, world_size, names):
    return {case.name: on_ranks(case, rank, world_size) for case in CASES if case.name in names}


def errors(got: Seen, want: Seen) -> dict[str, float]:
    """By the norm of each tensor; of a gradient, by the largest gradient's where its own is zero."""
    assert got.keys() == want.keys()
    largest = max(float(value.norm()) for name, value in want.items() if name.startswith("grad"))
    found = {}
    for name, value in want.items():
        scale = float(value.double().norm())
        if name.startswith("grad") and scale < 1e-10 * largest:
            scale = largest
        error = float((got[name].double() - value.double()).norm())
        found[name] = error / scale if scale else error
        if not bool(torch.isfinite(got[name]).all()):
            found[name] = float("inf")
    return found


def wrong(got: Seen, want: Seen) -> dict[str, float]:
    return {name: error for name, error in errors(got, want).items() if not error <= 1e-9}


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_as_one_process(world_size):
    names = [case.name for case in CASES] if world_size == 2 else FEW
    found = launch(all_cases, world_size, names)
    for case in CASES:
        if case.name not in names:
            continue
        oracle = alone(case, world_size)
        assert len(wrong({name: 1.01 * value for name, value in oracle.items()}, oracle)) > len(oracle) / 2
        for rank, (seen, _) in enumerate(ranks[case.name] for ranks in found):
            if not case.sync and rank > 0:  # its batch norms saw other samples; rank 0's count
                seen = {name: v for name, v in seen.items() if name.startswith(("loss", "grad"))}
                assert wrong(seen, {name: oracle[name] for name in seen}) == {}, (case.name, rank)
            else:
                assert wrong(seen, oracle) == {}, (case.name, rank)


def statistics_bytes(model: DenseNet | SequenceModel) -> tuple[int, int]:
    """What the docs say of SyncBatchNorm: (bytes, messages) per step, from shapes alone."""
    values, messages = 0, 0
    if isinstance(model, SequenceModel):
        norms, H = len(model.blocks) + 1, model.d_model
        return norms * (8 * (2 * H + 1) + 8 * 2 * H), norms * 2

    def forward(c):
        return 8 * (2 * c + 1)

    def backward(c):
        return 8 * 2 * c

    if hasattr(model.features, "norm0"):
        c = model.features.norm0.num_features
        values += forward(c) + backward(c)
        messages += 2
    for name, block in model.features.named_children():
        if not name.startswith("denseblock"):
            continue
        layers = list(block.children())
        values += forward(layers[0].norm1.num_features)  # the block's input
        messages += 1
        for layer in layers:
            new = layer.conv2.out_channels if layer.has_bottleneck else layer.conv1.out_channels
            values += forward(new) + backward(layer.norm1.num_features)
            messages += 2
            if layer.has_bottleneck:
                width = layer.conv1.out_channels
                values += forward(width) + backward(width)
                messages += 2
    for name, child in model.features.named_children():  # transitions and norm5 read moments that are known
        if name.startswith("transition") or name == "norm5":
            values += backward((child.norm if name.startswith("transition") else child).num_features)
            messages += 1
    return values, messages


@pytest.mark.parametrize("network", ["dense", "stem", "plain layers", "sequence"])
def test_traffic_is_that_of_the_docs(network):
    cases = {
        "plain": Case("", network),
        "sync": Case("", network, "layer", sync="lowtide"),
        "accumulated": Case("", network, batch=19, accumulate=3, sync="lowtide"),
    }
    found = launch(traffic_of, 2, cases)
    model = build(cases["plain"], 0)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    values, messages = statistics_bytes(model)
    for rank in found:
        assert rank["plain"] == {"gradients": gradients, "statistics": 0, "messages of statistics": 0}
        assert rank["sync"] == {
            "gradients": gradients, "statistics": values, "messages of statistics": messages
        }  # fmt: skip
        assert rank["accumulated"] == {
            "gradients": gradients, "statistics": 3 * values, "messages of statistics": 3 * messages
        }  # fmt: skip
        assert rank["no_sync forgotten"]["gradients"] == 3 * gradients  # so the count sees it


def traffic_of(rank, world_size, cases):
    found = {name: on_ranks(case, rank, world_size)[1] for name, case in cases.items()}
    found["no_sync forgotten"] = on_ranks(cases["accumulated"], rank, world_size, "no_sync forgotten")[1]
    return found


FAULTS = {
    "weight of the share": Case("", "dense"),
    "reduction of the gradient of gamma": Case("", "dense", sync="lowtide"),
    "reduction of the moments": Case("", "dense", sync="lowtide"),
}


def faulty(rank, world_size):
    found = {}
    for fault, case in FAULTS.items():
        with planted(fault):
            found[fault] = on_ranks(case, rank, world_size, fault)[0]
    return found


def test_the_comparison_sees_planted_faults():
    (found, _) = launch(faulty, 2)
    for fault, case in FAULTS.items():
        assert max(errors(found[fault], alone(case, 2)).values()) > 1e-4, fault


def diverging(rank, world_size, what):
    model = build(Case("", "dense"), seed=rank if what == "seeds" else 0)
    world = World(rank, world_size)
    if what == "one bit" and rank == 1:
        weight = model.features.denseblock1.denselayer2.conv1.weight.data
        weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0, dtype=torch.float64))
    if what == "facts":
        facts = {"number of samples": 10 + rank, "--seed": 0}
        check = lambda: world.check_same(facts, "here")  # noqa: E731
    else:
        check = lambda: check_equal(model.named_parameters(), world, "step 7")  # noqa: E731
    try:
        check()
    except RankError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", None),
        (
            "seeds",
            r"step 7: expected the same values on every rank, got \d+ of \d+ tensors that differ, the first feat",
        ),
        ("one bit", r"got 1 of \d+ tensors that differ, the first features.denseblock1.denselayer2.conv1.weight;"),
        (
            "facts",
            r"here: expected the same number of samples on every rank, got 10 on rank 0, 11 on rank 1; start",
        ),
    ],
)
def test_ranks_that_differ_are_told(what, words):
    for said in launch(diverging, 2, what):
        assert said is None if words is None else re.search(words, said), said
