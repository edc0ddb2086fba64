"""Pictures in folders, one folder per class, through torchvision's ImageFolder."""

from __future__ import annotations

from pathlib import Path

import torch

from lowtide.data.extras import import_extra
from lowtide.data.images import ImageFiles
from lowtide.errors import DataError, describe

# ImageNet's, which published weights expect
PHOTOGRAPH_MEAN = (0.485, 0.456, 0.406)
PHOTOGRAPH_STD = (0.229, 0.224, 0.225)
TEST_FRACTION = 0.2


def read_image_folder(root: Path) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    """Training files, test files and class names of `root`.

    `root` holds `train` and `test` (or `train` and `val`, as ImageNet does: then `val` is the test set) with a folder
    per class in each; or the class folders themselves: then every fifth file of a class, by name, is a test picture.

    Raises:
        DataError: a folder is missing, holds no class or no picture, or the two parts have different classes.
    """
    if not root.is_dir():
        raise DataError(describe(expected="a folder of images by class", got="no such folder", where=str(root)))
    if (root / "train").is_dir():
        names = [name for name in ("test", "val") if (root / name).is_dir()]
        if not names:
            raise DataError(describe(expected="test or val beside train", got="neither", where=str(root)))
        train, classes = _list(root / "train")
        test, test_classes = _list(root / names[0])
        if classes != test_classes:
            differ = sorted(set(classes) ^ set(test_classes))
            raise DataError(
                describe(
                    expected="the same classes in train and " + names[0],
                    got=f"{', '.join(differ[:5])} in one of them only",
                    where=str(root),
                )
            )
        return train, test, classes
    files, classes = _list(root)
    every = round(1 / TEST_FRACTION)
    seen = [0] * len(classes)
    is_test = []
    for label in files.labels.tolist():
        seen[label] += 1
        is_test.append(seen[label] % every == 0)
    if not any(is_test):
        raise DataError(describe(expected=f"{every} pictures or more in a class", got="fewer", where=str(root)))
    return _select(files, [not t for t in is_test]), _select(files, is_test), classes


def _select(files: ImageFiles, mask: list[bool]) -> ImageFiles:
    rows = [i for i, chosen in enumerate(mask) if chosen]
    return ImageFiles(tuple(files.paths[i] for i in rows), files.labels[rows])


def _list(folder: Path) -> tuple[ImageFiles, tuple[str, ...]]:
    datasets = import_extra("torchvision.datasets", "torchvision", "vision")
    try:
        listing = datasets.ImageFolder(str(folder))
    except FileNotFoundError as error:
        reason = " ".join(str(error).split())
        raise DataError(describe(expected="a folder per class with pictures", got=reason, where=str(folder))) from None
    paths, labels = zip(*listing.samples, strict=True)
    return ImageFiles(tuple(map(Path, paths)), torch.tensor(labels)), tuple(listing.classes)
