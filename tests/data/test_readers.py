"""Each reader on files in the data set's true format, and what it says of files that are not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets

from data import written_files
from lowtide.data import image_readers
from lowtide.data.image_readers import DEBIAN_FASHION_MNIST, IMAGE_SPECS
from lowtide.data.load import load_images
from lowtide.errors import ArgumentError, DataError


def test_digits_are_the_small_ones_enlarged() -> None:
    train, test = IMAGE_SPECS["digits"].read(None, False)
    assert train.images.shape == (1437, 1, 32, 32)
    assert test.images.shape == (360, 1, 32, 32)
    import sklearn.datasets

    bunch = sklearn.datasets.load_digits()
    small, large = bunch.images[5], train.images[5, 0].numpy()
    # half-pixel centres: the mean of the four pixels at a cell's middle is the small pixel up to the rounding of each
    middle = large.reshape(8, 4, 8, 4)[1:-1, 1:3, 1:-1, 1:3].astype(float).mean(axis=(1, 3))
    blurred = _bilinear_mean(small * 255 / 16)[1:-1, 1:-1]
    assert np.abs(middle - blurred).max() <= 0.5
    assert np.abs(middle - np.roll(blurred, 1, axis=1)).max() > 50, "a shifted picture would be seen"
    assert train.labels.tolist() == bunch.target[:1437].tolist()
    assert test.labels.tolist() == bunch.target[1437:].tolist()


def _bilinear_mean(a: np.ndarray) -> np.ndarray:
    """Mean of samples at -1/8 and +1/8 of a cell around each centre, per axis: 7/8 of it, 1/16 of each neighbour."""
    for axis in (0, 1):
        a = a * 7 / 8 + (np.roll(a, 1, axis) + np.roll(a, -1, axis)) / 16
    return a


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist(tmp_path: Path, compress: bool, below: str) -> None:
    contents = written_files.write_fashion_mnist(tmp_path / below, compress=compress)
    train, test = IMAGE_SPECS["fashion-mnist"].read(tmp_path, False)
    assert np.array_equal(train.images[:, 0].numpy(), contents["train-images-idx3-ubyte"])
    assert train.labels.tolist() == contents["train-labels-idx1-ubyte"].tolist()
    assert np.array_equal(test.images[:, 0].numpy(), contents["t10k-images-idx3-ubyte"])
    assert test.labels.tolist() == contents["t10k-labels-idx1-ubyte"].tolist()


@pytest.mark.data
def test_fashion_mnist_of_the_debian_package() -> None:
    if not DEBIAN_FASHION_MNIST.is_dir():
        if os.environ.get("LOWTIDE_REQUIRE_DATA"):
            pytest.fail(f"{DEBIAN_FASHION_MNIST} is missing: apt-get install dataset-fashion-mnist")
        pytest.skip(f"not run: {DEBIAN_FASHION_MNIST} is missing (Debian's dataset-fashion-mnist)")
    train, test = IMAGE_SPECS["fashion-mnist"].read(None, False)
    assert train.images.shape == (60000, 1, 28, 28)
    assert test.images.shape == (10000, 1, 28, 28)
    # published: balanced classes, and the mean pixel 0.2860 of the training pictures
    assert torch.bincount(train.labels).tolist() == [6000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    assert round(float(train.images.to(torch.float64).mean()) / 255, 4) == 0.2860


def test_fashion_mnist_faults(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder.*--download"):
        IMAGE_SPECS["fashion-mnist"].read(tmp_path / "absent", False)
    with pytest.raises(DataError, match=r"expected idx files.*got none"):
        IMAGE_SPECS["fashion-mnist"].read(tmp_path, False)
    written_files.write_fashion_mnist(tmp_path, compress=False)
    labels = tmp_path / "train-labels-idx1-ubyte"
    good = labels.read_bytes()

    labels.write_bytes(good[:-1] + b"\x0a")
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: expected labels 0\.\.9, got 10 at position 29"):
        IMAGE_SPECS["fashion-mnist"].read(tmp_path, False)

    labels.write_bytes(written_files.idx_bytes(np.zeros(29, np.uint8)))
    with pytest.raises(DataError, match=r"expected 30 labels, one for each image.*got 29"):
        IMAGE_SPECS["fashion-mnist"].read(tmp_path, False)

    labels.unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte or train-labels-idx1-ubyte\.gz, got no such file"):
        IMAGE_SPECS["fashion-mnist"].read(tmp_path, False)


def _patch_cifar(monkeypatch: pytest.MonkeyPatch, name: str, listed: tuple) -> None:
    """Tell torchvision the checksums of the files that the test wrote; all else is its own code."""
    train, test, meta = listed
    reader = getattr(torchvision.datasets, name)
    monkeypatch.setattr(reader, "train_list", [list(item) for item in train])
    monkeypatch.setattr(reader, "test_list", [list(item) for item in test])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": meta})


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch_cifar(monkeypatch, "CIFAR10", written_files.write_cifar10(tmp_path))
    train, test = IMAGE_SPECS["cifar10"].read(tmp_path, False)
    assert train.images.shape == (60, 3, 32, 32)
    assert test.images.shape == (12, 3, 32, 32)
    third = written_files.pictures(12, 3072, seed=2)  # data_batch_3
    assert np.array_equal(train.images[24:36].numpy(), third.reshape(12, 3, 32, 32))
    assert train.labels[24:36].tolist() == [(2 + j) % 10 for j in range(12)]
    assert test.labels.tolist() == [(5 + j) % 10 for j in range(12)]


def test_cifar100_has_the_fine_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch_cifar(monkeypatch, "CIFAR100", written_files.write_cifar100(tmp_path))
    train, test = IMAGE_SPECS["cifar100"].read(tmp_path, False)
    assert train.labels.tolist() == [(7 * j) % 100 for j in range(40)]
    assert np.array_equal(test.images.numpy(), written_files.pictures(40, 3072, seed=1).reshape(40, 3, 32, 32))


def test_svhn_calls_the_digit_0_class_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = written_files.write_svhn(tmp_path)
    known = torchvision.datasets.SVHN.split_list
    patched = {part: [known[part][0], known[part][1], md5] for part, (_, _, md5) in parts.items()}
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", patched)
    train, test = IMAGE_SPECS["svhn"].read(tmp_path, False)
    assert np.array_equal(train.images.numpy(), parts["train"][0].transpose(0, 3, 1, 2))
    assert train.labels.tolist() == [int(y) % 10 for y in parts["train"][1]]
    assert np.array_equal(test.images.numpy(), parts["test"][0].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(DataError, match=r"expected the folder of CIFAR.*no such folder.*--download"):
        load_images(name, root=tmp_path)
    write = written_files.write_cifar10 if name == "cifar10" else written_files.write_cifar100
    listed = write(tmp_path)
    _patch_cifar(monkeypatch, name.upper(), listed)
    filename = listed[0][0][0]
    path = next(tmp_path.glob(f"*/{filename}"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{filename}: expected md5 .* got md5 .* bytes\)"):
        load_images(name, root=tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=rf"{filename}: expected a file of CIFAR.*no such file"):
        load_images(name, root=tmp_path)


def test_svhn_faults(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_32x32\.mat: expected a file of svhn, got no such file"):
        load_images("svhn", root=tmp_path)
    (tmp_path / "train_32x32.mat").write_bytes(b"not a mat file")
    with pytest.raises(DataError, match=r"train_32x32\.mat: expected md5 .* \(14 bytes\)"):
        load_images("svhn", root=tmp_path)


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise RuntimeError("no route\nto host")

    monkeypatch.setattr(image_readers, "import_extra", lambda *a: type("M", (), {"CIFAR10": refuse}))
    with pytest.raises(DataError, match=r"--download: expected to download CIFAR10, got no route to host$"):
        load_images("cifar10", root=tmp_path, download=True)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ArgumentError, match=r"digits, fashion-mnist, cifar10, cifar100, svhn, folder:PATH, got 'mnits'"
    ):
        load_images("mnits")
