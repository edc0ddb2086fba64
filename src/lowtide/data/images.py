"""Labelled images: a source of uint8 pictures, the three parts (train, validation, test), and batches made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lowtide.data.batches import Batch, BatchDataset, BatchKey
from lowtide.data.extras import import_extra
from lowtide.data.seeds import derive_seed, generator
from lowtide.errors import ArgumentError, DataError, describe

Transform = Callable[[Tensor], Tensor]


class ImageSource(Protocol):
    """Pictures and their classes, wherever they are kept."""

    @property
    def labels(self) -> Tensor:
        """(N,) int64."""
        ...

    def image(self, row: int) -> Tensor:
        """(C, H, W) uint8."""
        ...


@dataclass(frozen=True)
class ImageArray:
    """Pictures in memory: images (N, C, H, W) uint8, labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def image(self, row: int) -> Tensor:
        return self.images[row]


@dataclass(frozen=True)
class ImageFiles:
    """Pictures that stay in their files and are decoded, as RGB, when they are asked for."""

    paths: tuple[Path, ...]
    labels: Tensor

    def image(self, row: int) -> Tensor:
        return read_image(self.paths[row], channels=3)


def read_image(path: Path, channels: int) -> Tensor:
    """Decode a picture to uint8 (channels, H, W): 1 is grey, 3 is RGB.

    Raises:
        DataError: the file is missing, truncated, or of no format that Pillow reads.
    """
    pillow = import_extra("PIL.Image", "pillow", "vision")
    functional = import_extra("torchvision.transforms.v2.functional", "torchvision", "vision")
    try:
        with pillow.open(path) as picture:
            return functional.pil_to_tensor(picture.convert("L" if channels == 1 else "RGB"))
    except OSError as error:  # Pillow's "cannot identify" and "truncated" are OSErrors as well
        got = error.strerror or str(error).replace(f" {str(path)!r}", "")
        raise DataError(describe(expected="a readable picture", got=got, where=str(path))) from None


def prepare_image(path: Path, preprocessing: Preprocessing) -> Tensor:
    """A picture file as the network reads it: (C, H, W) float32."""
    transforms = import_extra("lowtide.data.augment", "torchvision", "vision")
    image = read_image(path, preprocessing.channels)
    if preprocessing.photograph:
        image = transforms.centre_crop(preprocessing.size[0])(image)
    else:
        image = transforms.resize(preprocessing.size)(image)
    return normalise(image.unsqueeze(0), preprocessing.mean, preprocessing.std).squeeze(0)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(N, C, H, W) uint8 to float32: scaled to 0..1, minus the mean, over the standard deviation, per channel."""
    channels = (1, -1, 1, 1)
    scaled = images.to(torch.float32).div_(255)
    return scaled.sub_(torch.tensor(mean).view(channels)).div_(torch.tensor(std).view(channels))


def check_labels(labels: Tensor, n_classes: int, where: str) -> Tensor:
    """`labels` as int64 if all are in 0..n_classes-1.

    Raises:
        DataError: some are not; names the first one and its position.
    """
    labels = labels.to(torch.int64)
    wrong = ((labels < 0) | (labels >= n_classes)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        got = f"{int(labels[first])} at position {first} ({len(wrong)} such labels)"
        raise DataError(describe(expected=f"labels 0..{n_classes - 1}", got=got, where=where))
    return labels


class ImageBatches(BatchDataset):
    """Rows of a source as normalised float32 batches; a transform is seeded by (seed, epoch, position in the split).

    mean, std: per channel, of pixels scaled to 0..1.
    """

    def __init__(
        self,
        source: ImageSource,
        rows: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.source = source
        self.rows = rows
        self.transform = transform
        self.seed = seed
        self.mean = tuple(mean)
        self.std = tuple(std)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: BatchKey) -> Batch:
        rows = self.rows[list(key.positions)]
        images = [self.source.image(row) for row in rows.tolist()]
        if self.transform is not None:
            # the transforms draw from the global generator, which is the model's (dropout): lend it and give it back
            with torch.random.fork_rng(devices=[]):
                for i, position in enumerate(key.positions):
                    torch.default_generator.manual_seed(derive_seed(self.seed, "augment", key.epoch, position))
                    images[i] = self.transform(images[i])
        pixels = normalise(torch.stack(images), self.mean, self.std)
        return Batch((pixels,), self.source.labels[rows], rows, len(rows))


@dataclass(frozen=True)
class Preprocessing:
    """All that turns a picture into the network's input; stored in checkpoints, so that a picture is read the same way.

    size: (H, W). photograph: scale the shorter side and cut the middle, instead of scaling the whole picture to `size`.
    """

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    photograph: bool


@dataclass(frozen=True)
class ImageData:
    """One data set, ready for training: three parts that share no picture. `validation` may be empty (None)."""

    name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    train: ImageBatches
    validation: ImageBatches | None
    test: ImageBatches


def pixel_statistics(source: ImageArray, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels scaled to 0..1, over the given rows."""
    total = torch.zeros(source.images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for some in rows.split(1024):
        pixels = source.images[some].to(torch.float64).div_(255)
        total += pixels.sum(dim=(0, 2, 3))
        squares += pixels.square_().sum(dim=(0, 2, 3))
    count = len(rows) * source.images[0, 0].numel()
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def hold_out(n: int, fraction: float, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Rows for training and rows held out for validation, drawn by the seed; `limit` keeps that many for training.

    The held-out part is `fraction` of both parts together, so it shrinks with the limit.

    Raises:
        ArgumentError: a fraction outside [0, 1) or that leaves nothing to train on, or a limit below 1.
    """
    if not 0 <= fraction < 1:
        raise ArgumentError(describe(expected="a fraction in [0, 1)", got=fraction, where="--validation"))
    if limit is not None and limit < 1:
        raise ArgumentError(describe(expected="at least 1", got=limit, where="--limit-train"))
    order = torch.randperm(n, generator=generator(seed, "split"))
    n_held_out = round(n * fraction)
    n_train = n - n_held_out
    if n_train < 1:
        got = f"{n_held_out} of {n} held out"
        raise ArgumentError(describe(expected="pictures left to train on", got=got, where="--validation"))
    if limit is not None and limit < n_train:
        n_train = limit
        n_held_out = min(n_held_out, round(limit * fraction / (1 - fraction)))
    return order[:n_train], order[n_train : n_train + n_held_out]
