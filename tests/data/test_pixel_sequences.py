"""Pictures as sequences of grey pixels."""

from __future__ import annotations

import pytest
import torch

from lowtide.data import load_sequences as loading
from lowtide.data.batches import BatchKey
from lowtide.data.image_readers import IMAGE_SPECS
from lowtide.data.images import ImageArray
from lowtide.data.load_sequences import load_sequences


@pytest.mark.parametrize(("side", "length"), [(None, 64), (16, 256), (32, 1024)])
def test_digits(side: int | None, length: int) -> None:
    data = load_sequences("digits", side=side)
    assert data.format.length == length
    whole = data.train[BatchKey(0, tuple(range(len(data.train))))]
    (x,) = whole.inputs
    assert x.shape == (len(data.train), length, 1)
    # normalised by the training part itself
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3
    assert len(data.test) == 360


def test_rows_are_read_from_left_to_right_and_top_to_bottom() -> None:
    source = IMAGE_SPECS["digits"].read(None, False)[1]
    data = load_sequences("digits", side=32)
    (x,) = data.test[BatchKey(0, (4,))].inputs
    pixels = x[0, :, 0] * data.format.std + data.format.mean
    assert torch.allclose(pixels * 255, source.images[4, 0].flatten().to(torch.float32), atol=1e-3)
    reduced = load_sequences("digits", side=8)
    (small,) = reduced.test[BatchKey(0, (4,))].inputs
    means = source.images[4, 0].to(torch.float64).unflatten(0, (8, 4)).unflatten(2, (8, 4)).mean((1, 3))
    assert torch.allclose(
        (small[0, :, 0] * reduced.format.std + reduced.format.mean).view(8, 8) * 255, means.float(), atol=0.51
    )


def test_colours_become_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pure colours have their weights; a grey picture stays what it is."""
    images = torch.zeros(40, 3, 32, 32, dtype=torch.uint8)
    for channel in range(3):
        images[channel, channel] = 200
    images[3] = 77
    source = ImageArray(images, torch.arange(40) % 10)
    spec = IMAGE_SPECS["cifar10"]
    monkeypatch.setitem(
        loading.IMAGE_SPECS,
        "cifar10",
        type(spec)(lambda root, download: (source, source), *((spec.classes), 4, True, 1)),
    )
    data = load_sequences("cifar10")
    assert data.format.length == 1024
    (x,) = data.test[BatchKey(0, (0, 1, 2, 3))].inputs
    grey = (x[:, 0, 0] * data.format.std + data.format.mean) * 255
    assert grey.round().tolist() == [60, 117, 23, 77]


def test_a_trained_networks_statistics_are_kept() -> None:
    data = load_sequences("digits", statistics=(0.25, 2.0))
    assert (data.format.mean, data.format.std) == (0.25, 2.0)
    own = load_sequences("digits")
    (x,), (y,) = data.test[BatchKey(0, (0,))].inputs, own.test[BatchKey(0, (0,))].inputs
    assert torch.allclose(x * 2 + 0.25, y * own.format.std + own.format.mean, atol=1e-6)
