"""The standard augmentations, as torchvision transforms on uint8 images (C, H, W).

They draw from torch's global generator; `ImageBatches` seeds it per sample, so they need no state of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchvision.transforms import v2

from lowtide.data.images import Transform


def crop_and_mirror(size: tuple[int, int], padding: int, mirror: bool, fill: Sequence[float]) -> Transform:
    """A random crop out of the image with `padding` pixels added on each side, and a mirror image half of the time.

    fill: per channel, 0..255. The published recipe pads AFTER subtracting the mean, with zeros: so here with the mean.
    """
    steps: list[Transform] = [v2.RandomCrop(list(size), padding=padding, fill=[round(value) for value in fill])]
    if mirror:
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose(steps)


def random_resized_crop(size: int) -> Transform:
    """A random part (8 to 100 % of the area) of a photograph, scaled to `size` x `size`, mirrored half of the time."""
    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])


def centre_crop(size: int) -> Transform:
    """The middle of a photograph, its shorter side first scaled to 8/7 of `size` (256 for 224)."""
    return v2.Compose([v2.Resize(round(size * 8 / 7), antialias=True), v2.CenterCrop(size)])


def resize(size: tuple[int, int]) -> Transform:
    """The whole image scaled to `size`, whatever its proportions."""
    return v2.Resize(list(size), antialias=True)
