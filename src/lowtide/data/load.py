"""From a data set's name to its three parts: `load_images`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch

from lowtide.data import image_folder
from lowtide.data.extras import import_extra
from lowtide.data.image_readers import IMAGE_SPECS, ImageSpec
from lowtide.data.images import ImageBatches, ImageData, Preprocessing, hold_out, pixel_statistics
from lowtide.errors import ArgumentError, describe

Augment = Literal["standard", "none"]
FOLDER = "folder:"


def load_images(
    name: str,
    *,
    root: Path | None = None,
    download: bool = False,
    validation: float = 0.1,
    limit_train: int | None = None,
    limit_test: int | None = None,
    augment: Augment = "standard",
    image_size: int = 224,
    seed: int = 0,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> ImageData:
    """Read a data set and split it.

    Args:
        name: digits, fashion-mnist, cifar10, cifar100, svhn, or folder:PATH (pictures in a folder per class).
        root: folder of the files; None looks in ./data (and in Debian's package for fashion-mnist).
        download: fetch missing files through torchvision, where it can.
        validation: fraction of the training pictures that is held out, drawn by `seed`; never of the test set.
        limit_train, limit_test: use that many training pictures (the first test pictures) only.
        augment: the data set's standard augmentation of training pictures, or none.
        image_size: side of the crop taken from photographs; for folder:PATH only.
        seed: fixes the split and each picture's augmentation in each epoch.
        statistics: mean and standard deviation per channel to normalise by, those that a trained network is used to;
            None takes them from the training part.

    Raises:
        DataError: files are missing, damaged, or hold other things than they should.
        ArgumentError: an unknown name or an option out of range.
        MissingDependencyError: torchvision or scikit-learn is needed.
    """
    if augment not in get_args(Augment):
        expected = f"one of {', '.join(get_args(Augment))}"
        raise ArgumentError(describe(expected=expected, got=repr(augment), where="--augment"))
    if limit_test is not None and limit_test < 1:
        raise ArgumentError(describe(expected="at least 1", got=limit_test, where="--limit-test"))
    if image_size < 1:
        raise ArgumentError(describe(expected="at least 1", got=image_size, where="--image-size"))
    transforms = import_extra("lowtide.data.augment", "torchvision", "vision")
    if name.startswith(FOLDER):
        train, test, classes = image_folder.read_image_folder(Path(name.removeprefix(FOLDER)))
        rows, held_out = hold_out(len(train.labels), validation, limit_train, seed)
        mean, std = statistics or (image_folder.PHOTOGRAPH_MEAN, image_folder.PHOTOGRAPH_STD)
        preprocessing = Preprocessing(3, (image_size, image_size), mean, std, photograph=True)
        plain = transforms.centre_crop(image_size)
        augmented = transforms.random_resized_crop(image_size)
    else:
        spec = image_spec(name)
        classes = spec.classes
        train, test = spec.read(root, download)
        rows, held_out = hold_out(len(train.labels), validation, limit_train, seed)
        mean, std = statistics or pixel_statistics(train, rows)
        channels, height, width = train.images.shape[1:]
        preprocessing = Preprocessing(channels, (height, width), mean, std, photograph=False)
        plain = augmented = None
        if spec.padding:
            fill = [255 * value for value in mean]
            augmented = transforms.crop_and_mirror((height, width), spec.padding, spec.mirror, fill)
    return ImageData(
        name=name,
        classes=classes,
        preprocessing=preprocessing,
        train=ImageBatches(train, rows, mean, std, augmented if augment == "standard" else plain, seed),
        validation=ImageBatches(train, held_out, mean, std, plain) if len(held_out) else None,
        test=ImageBatches(test, torch.arange(len(test.labels))[:limit_test], mean, std, plain),
    )


def image_spec(name: str) -> ImageSpec:
    """The reader and recipe of a known data set.

    Raises:
        ArgumentError: no such data set; the message lists them.
    """
    if name not in IMAGE_SPECS:
        expected = f"one of {', '.join((*IMAGE_SPECS, FOLDER + 'PATH'))}"
        raise ArgumentError(describe(expected=expected, got=repr(name), where="--data"))
    return IMAGE_SPECS[name]
