"""Order, shares, splits and augmentation: a function of seed, epoch and position alone."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.data.batches import BatchKey, EpochPlan, evaluation_keys, make_loader
from lowtide.data.images import ImageArray, ImageBatches, check_labels, hold_out, normalise, pixel_statistics
from lowtide.data.load import load_images
from lowtide.errors import ArgumentError, DataError


@given(
    n=st.integers(8, 200), batch=st.integers(8, 64), accumulate=st.integers(1, 2), world=st.integers(1, 2),
    epoch=st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_holds_every_sample_once(n: int, batch: int, accumulate: int, world: int, epoch: int) -> None:
    plan = EpochPlan(n, batch, seed=1, accumulate=accumulate, world_size=world)
    ranks = [plan.keys(epoch, rank) for rank in range(world)]
    assert all(len(steps) == plan.steps for steps in ranks)
    seen: Counter[int] = Counter()
    for step, parts in enumerate(zip(*ranks, strict=True)):
        keys = list(itertools.chain(*parts))
        assert len(keys) == accumulate * world
        sizes = [len(key.positions) for key in keys]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 2
        assert sum(sizes) == min(batch, n - step * batch)
        assert all(key.epoch == epoch for key in keys)
        seen.update(itertools.chain(*(key.positions for key in keys)))
    assert set(seen.values()) == {1}
    left_out = n - len(seen)
    assert left_out < 2 * accumulate * world
    assert left_out == 0 or left_out == n % batch


def test_epochs_differ_and_a_later_start_is_a_suffix() -> None:
    plan = EpochPlan(100, 10, seed=3)
    orders = [[key.positions for step in plan.keys(epoch) for key in step] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert plan.keys(4) == EpochPlan(100, 10, seed=3).keys(4)
    assert plan.keys(4) != EpochPlan(100, 10, seed=4).keys(4)
    assert plan.keys(4, start=7) == plan.keys(4)[7:]


@pytest.mark.parametrize(("n", "batch", "accumulate"), [(100, 3, 2), (3, 64, 2), (1, 64, 1)])
def test_too_few_samples_for_a_share_are_refused(n: int, batch: int, accumulate: int) -> None:
    with pytest.raises(DataError, match=r"expected two samples or more for each of .* shares"):
        EpochPlan(n, batch, seed=0, accumulate=accumulate)


@given(n=st.integers(0, 50), batch=st.integers(1, 20), world=st.integers(1, 4))
def test_evaluation_sees_every_sample_once_in_order(n: int, batch: int, world: int) -> None:
    keys = [key for rank in range(world) for key in evaluation_keys(n, batch, rank, world)]
    assert list(itertools.chain(*(key.positions for key in keys))) == list(range(n))


@given(n=st.integers(1, 300), fraction=st.floats(0, 0.9), limit=st.none() | st.integers(1, 400), seed=st.integers(0, 9))
def test_held_out_rows_are_never_training_rows(n: int, fraction: float, limit: int | None, seed: int) -> None:
    if round(n * fraction) == n:
        with pytest.raises(ArgumentError, match="--validation: expected pictures left to train on"):
            hold_out(n, fraction, limit, seed)
        return
    train, held_out = hold_out(n, fraction, limit, seed)
    rows = torch.cat([train, held_out]).tolist()
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(n))
    if limit is None:
        assert len(rows) == n
        assert len(held_out) == round(n * fraction)
    else:
        assert len(train) == min(limit, n - round(n * fraction))
    assert torch.equal(train, hold_out(n, fraction, limit, seed)[0])


def test_hold_out_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ArgumentError, match=r"--validation: expected a fraction in \[0, 1\), got 1"):
        hold_out(10, 1.0, None, 0)
    with pytest.raises(ArgumentError, match="--limit-train: expected at least 1, got 0"):
        hold_out(10, 0.1, 0, 0)


def test_the_seed_draws_another_split() -> None:
    assert hold_out(100, 0.1, None, 0)[1].tolist() != hold_out(100, 0.1, None, 1)[1].tolist()


def test_validation_and_test_pictures_are_not_augmented_and_training_pictures_are() -> None:
    data = load_images("digits")
    assert data.validation is not None
    for part in (data.validation, data.test):
        key = (0, 1, 2)
        assert torch.equal(part[BatchKey(0, key)].inputs[0], part[BatchKey(1, key)].inputs[0])
        stored = torch.stack([part.source.image(int(row)) for row in part.rows[:3]])
        assert torch.equal(part[BatchKey(0, key)].inputs[0], normalise(stored, part.mean, part.std))
    first, second = (data.train[BatchKey(epoch, tuple(range(64)))].inputs[0] for epoch in (0, 1))
    changed = (first != second).flatten(1).any(dim=1).float().mean()
    assert changed > 0.9, "a crop out of 9 x 9 places repeats once in 81 times"


def test_augmentation_is_a_crop_of_the_padded_picture() -> None:
    """Every training picture is one of the 81 crops (and their mirror images), padded with the mean."""
    from lowtide.data.augment import crop_and_mirror

    images = torch.randint(0, 256, (8, 3, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fill = (10.2, 120.0, 240.9)
    source = ImageArray(images, torch.zeros(8, dtype=torch.int64))
    part = ImageBatches(source, torch.arange(8), (0,) * 3, (1 / 255,) * 3, crop_and_mirror((10, 12), 4, True, fill))
    padded = torch.tensor([10, 120, 241], dtype=torch.uint8).view(3, 1, 1).expand(3, 18, 20).repeat(8, 1, 1, 1)
    padded[:, :, 4:14, 4:16] = images
    crops = padded.unfold(2, 10, 1).unfold(3, 12, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)  # (8, 81, 3, 10, 12)
    mirrored = 0
    for epoch in range(6):
        got = part[BatchKey(epoch, tuple(range(8)))].inputs[0].round().to(torch.uint8)
        for image, candidates in zip(got, crops, strict=True):
            straight = (candidates == image).flatten(1).all(dim=1).any()
            flipped = (candidates == image.flip(-1)).flatten(1).all(dim=1).any()
            assert straight ^ flipped
            mirrored += int(flipped)
    assert 10 < mirrored < 38, "half of 48"


@pytest.mark.parametrize("workers", [0, 2])
def test_content_depends_on_the_key_alone(workers: int) -> None:
    """Neither other batches, nor their order, nor workers change a batch; the global generator is not drawn from."""
    data = load_images("digits", limit_train=60)
    keys = [key for step in EpochPlan(60, 20, seed=0).keys(2) for key in step]
    alone = [data.train[key] for key in reversed(keys)][::-1]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loaded = list(make_loader(data.train, keys, workers))
    assert torch.equal(torch.get_rng_state(), before)
    for got, expected in zip(loaded, alone, strict=True):
        assert torch.equal(got.inputs[0], expected.inputs[0])
        assert torch.equal(got.target, expected.target)
        assert torch.equal(got.indices, expected.indices)
        assert got.n_targets == 20


def test_statistics_are_those_of_the_training_rows_alone() -> None:
    images = torch.randint(0, 256, (3000, 2, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(0, 2500)
    mean, std = pixel_statistics(ImageArray(images, torch.zeros(3000)), rows)
    scaled = images[:2500].double() / 255
    assert torch.allclose(torch.tensor(mean).double(), scaled.mean(dim=(0, 2, 3)))
    assert torch.allclose(torch.tensor(std).double(), scaled.std(dim=(0, 2, 3), correction=0))
    z = normalise(images[:2500], mean, std)
    assert z.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    assert (z.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("labels", "said"), [([0, 3, 10], "got 10 at position 2"), ([0, -1, -1], r"-1 at position 1 \(2")]
)
def test_labels_out_of_range(labels: list[int], said: str) -> None:
    with pytest.raises(DataError, match=rf"file\.bin: expected labels 0\.\.9, {said}|{said}"):
        check_labels(torch.tensor(labels), 10, "file.bin")
    assert check_labels(torch.tensor([0, 9], dtype=torch.uint8), 10, "").tolist() == [0, 9]
