"""Readers of the known image data sets: each returns its training and test pictures, or says which file is wrong."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import torch
from torch.nn import functional as F

from lowtide.data.extras import import_extra
from lowtide.data.idx import read_idx
from lowtide.data.images import ImageArray, check_labels
from lowtide.errors import DataError, describe

DEFAULT_ROOT = Path("data")
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class ImageSpec:
    """A known data set: how it is read, and its standard recipe.

    read: (folder or None, download) -> (train, test). padding, mirror: the standard augmentation. epochs: of the
    published recipe where there is one.
    """

    read: Callable[[Path | None, bool], tuple[ImageArray, ImageArray]]
    classes: tuple[str, ...]
    padding: int
    mirror: bool
    epochs: int


def read_digits(root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    """scikit-learn's 1,797 handwritten digits, 8x8, enlarged to 32x32; they are inside its wheel.

    The last 360 are the test set: they come from other writers than the rest, as in the original files.
    """
    bunch = import_extra("sklearn.datasets", "scikit-learn", "vision").load_digits()
    small = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1)
    large = F.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
    images = (large * (255 / 16)).round_().clamp_(0, 255).to(torch.uint8)
    labels = check_labels(torch.from_numpy(bunch.target), 10, "digits")
    return ImageArray(images[:-360], labels[:-360]), ImageArray(images[-360:], labels[-360:])


def read_fashion_mnist(root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    """Fashion-MNIST: four idx files, plain or gzip, in `root`, torchvision's place below it, or Debian's package."""
    if download:
        datasets = import_extra("torchvision.datasets", "torchvision", "vision")
        _download("fashion-mnist", lambda: datasets.FashionMNIST(str(root or DEFAULT_ROOT), download=True))
    base = root or DEFAULT_ROOT
    folders = [base, base / "FashionMNIST" / "raw"]
    if root is None:
        folders.append(DEBIAN_FASHION_MNIST)
    for folder in folders:
        if any(folder.glob("*-idx?-ubyte*")):
            return _idx_pair(folder, "train"), _idx_pair(folder, "t10k")
    raise DataError(
        describe(
            expected="idx files such as train-images-idx3-ubyte.gz",
            got="none" if base.is_dir() else "no such folder",
            where=f"fashion-mnist in {', '.join(map(str, folders))}",
            fix="install Debian's dataset-fashion-mnist, name the folder by --data-dir, or add --download",
        )
    )


def _idx_pair(folder: Path, part: str) -> ImageArray:
    def find(name: str) -> Path:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
        raise DataError(describe(expected=f"{name} or {name}.gz", got="no such file", where=str(folder)))

    image_path, label_path = find(f"{part}-images-idx3-ubyte"), find(f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(images) != len(labels):
        raise DataError(
            describe(
                expected=f"{len(images)} labels, one for each image of {image_path.name}",
                got=len(labels),
                where=str(label_path),
            )
        )
    return ImageArray(images.unsqueeze(1), check_labels(labels, 10, str(label_path)))


def read_cifar10(root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    """CIFAR-10, the Python version, as torchvision reads it."""
    return _read_cifar("CIFAR10", 10, root, download)


def read_cifar100(root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    """CIFAR-100 with its fine labels, the Python version, as torchvision reads it."""
    return _read_cifar("CIFAR100", 100, root, download)


def _read_cifar(name: str, n_classes: int, root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    reader = getattr(import_extra("torchvision.datasets", "torchvision", "vision"), name)
    base = root or DEFAULT_ROOT
    if download:
        _download(name, lambda: reader(str(base), download=True))
    files = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
    _check_files(name, base / reader.base_folder, files)
    parts = []
    for train in (True, False):
        with warnings.catch_warnings():
            # the files were pickled by Python 2, whose numpy wrote the flag `align` as a number
            warnings.filterwarnings("ignore", message=r".*align should be passed as Python or NumPy boolean")
            read = reader(str(base), train=train)
        images = torch.from_numpy(read.data).permute(0, 3, 1, 2).contiguous()
        parts.append(ImageArray(images, check_labels(torch.tensor(read.targets), n_classes, name)))
    return parts[0], parts[1]


def read_svhn(root: Path | None, download: bool) -> tuple[ImageArray, ImageArray]:
    """Street View House Numbers, the cropped digits: train_32x32.mat and test_32x32.mat (not the extra ones)."""
    reader = import_extra("torchvision.datasets", "torchvision", "vision").SVHN
    base = root or DEFAULT_ROOT
    if download:
        for split in ("train", "test"):
            _download("svhn", lambda split=split: reader(str(base), split=split, download=True))
    parts = []
    for split in ("train", "test"):
        _, filename, md5 = reader.split_list[split]
        _check_files("svhn", base, [(filename, md5)])
        read = reader(str(base), split=split)
        labels = check_labels(torch.from_numpy(read.labels), 10, str(base / filename))
        parts.append(ImageArray(torch.from_numpy(read.data), labels))
    return parts[0], parts[1]


def _check_files(name: str, folder: Path, files: list[tuple[str, str]]) -> None:
    """Each file is there and is the published one; torchvision would only say that something is missing or damaged."""
    if not folder.is_dir():
        fix = "name its parent by --data-dir, or add --download"
        raise DataError(describe(expected=f"the folder of {name}", got="no such folder", where=str(folder), fix=fix))
    for filename, md5 in files:
        path = folder / filename
        if not path.is_file():
            fix = "add --download"
            raise DataError(describe(expected="a file of " + name, got="no such file", where=str(path), fix=fix))
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            got = f"md5 {found} ({path.stat().st_size} bytes)"
            fix = "the file is truncated or another one: delete it and add --download"
            raise DataError(describe(expected=f"md5 {md5}", got=got, where=str(path), fix=fix))


def _download(name: str, fetch: Callable[[], object]) -> None:
    try:
        fetch()
    except (RuntimeError, URLError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(describe(expected=f"to download {name}", got=reason, where="--download")) from None


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip
DIGIT_CLASSES = tuple("0123456789")

IMAGE_SPECS: dict[str, ImageSpec] = {
    # a digit's mirror image is no digit; one pixel of the 8x8 originals is four here
    "digits": ImageSpec(read_digits, DIGIT_CLASSES, padding=4, mirror=False, epochs=30),
    "fashion-mnist": ImageSpec(read_fashion_mnist, FASHION_CLASSES, padding=4, mirror=True, epochs=30),
    "cifar10": ImageSpec(read_cifar10, CIFAR10_CLASSES, padding=4, mirror=True, epochs=300),
    "cifar100": ImageSpec(
        read_cifar100, tuple(f"class {i}" for i in range(100)), padding=4, mirror=True, epochs=300
    ),
    # the published recipe trains on SVHN without augmentation
    "svhn": ImageSpec(read_svhn, DIGIT_CLASSES, padding=0, mirror=False, epochs=40),
}  # fmt: skip
