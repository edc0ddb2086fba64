"""Small files in the true formats of the public data sets, written byte by byte as their documentation says."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.io
from numpy.typing import NDArray
from PIL import Image

Bytes = NDArray[np.uint8]


def pictures(n: int, *shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def idx_bytes(array: Bytes) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">i", size) for size in array.shape)
    return head + array.tobytes()


def write_fashion_mnist(folder: Path, n_train: int = 30, n_test: int = 10, compress: bool = True) -> dict[str, Bytes]:
    """The four files; returns their contents by name without suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    for part, n in (("train", n_train), ("t10k", n_test)):
        contents[f"{part}-images-idx3-ubyte"] = pictures(n, 28, 28, seed=n)
        contents[f"{part}-labels-idx1-ubyte"] = (np.arange(n) % 10).astype(np.uint8)
    for name, array in contents.items():
        content = idx_bytes(array)
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return contents


class _AsPython2Wrote:
    """Pickles an array as Python 2's numpy did: dtype('u1', 0, 1), whose flags are numbers."""

    def __init__(self, array: Bytes) -> None:
        self.array = array

    def __reduce__(self) -> tuple[object, ...]:
        reconstruct, arguments, state = self.array.__reduce__()
        version, shape, _, order, content = state
        return reconstruct, arguments, (version, shape, _Python2Dtype(), order, content)


class _Python2Dtype:
    def __reduce__(self) -> tuple[object, ...]:
        return np.dtype, ("u1", 0, 1), (3, "|", None, None, None, -1, -1, 0)


def _write_pickle(path: Path, content: dict[str, object]) -> tuple[str, str]:
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar10(root: Path, per_file: int = 12) -> tuple[list[tuple[str, str]], list[tuple[str, str]], str]:
    """Five training files, one test file and the names; returns (name, md5) of the former and the md5 of the latter."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    listed = []
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        # a row is 1,024 red, 1,024 green, 1,024 blue bytes of one picture, row by row
        rows = pictures(per_file, 3072, seed=i)
        labels = [(i + j) % 10 for j in range(per_file)]
        names = [f"{name}_{j}.png" for j in range(per_file)]
        content = {"batch_label": name, "labels": labels, "data": _AsPython2Wrote(rows), "filenames": names}
        listed.append(_write_pickle(folder / name, content))
    classes = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    _, meta = _write_pickle(folder / "batches.meta", {"num_vis": 3072, "label_names": classes})
    return listed[:5], listed[5:], meta


def write_cifar100(root: Path, n: int = 40) -> tuple[list[tuple[str, str]], list[tuple[str, str]], str]:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    listed = []
    for i, name in enumerate(("train", "test")):
        content: dict[str, object] = {
            "data": _AsPython2Wrote(pictures(n, 3072, seed=i)),
            "fine_labels": [(7 * j) % 100 for j in range(n)],
            "coarse_labels": [j % 20 for j in range(n)],
            "batch_label": name,
            "filenames": [f"{j}.png" for j in range(n)],
        }
        listed.append(_write_pickle(folder / name, content))
    names = {"fine_label_names": [f"f{i}" for i in range(100)], "coarse_label_names": [f"c{i}" for i in range(20)]}
    _, meta = _write_pickle(folder / "meta", dict(names))
    return listed[:1], listed[1:], meta


def write_svhn(root: Path, n: int = 20) -> dict[str, tuple[Bytes, NDArray[np.uint8], str]]:
    """X is (32, 32, 3, n), y is (n, 1) with 10 for the digit 0; returns pictures, labels as written, and the md5."""
    root.mkdir(parents=True, exist_ok=True)
    parts = {}
    for i, part in enumerate(("train", "test")):
        images = pictures(n, 32, 32, 3, seed=i)
        labels = (np.arange(n) % 10 + 1).astype(np.uint8)
        path = root / f"{part}_32x32.mat"
        scipy.io.savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None]})
        parts[part] = (images, labels, hashlib.md5(path.read_bytes()).hexdigest())
    return parts


def write_folder(root: Path, classes: Sequence[str], per_class: int, size: tuple[int, int] = (40, 50)) -> None:
    """PNG pictures in a folder per class; the class's number is the picture's red value over 40."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for j in range(per_class):
            picture = pictures(1, *size, 3, seed=100 * label + j)[0]
            picture[..., 0] = 40 * label
            Image.fromarray(picture).save(root / name / f"{j:03d}.png")
