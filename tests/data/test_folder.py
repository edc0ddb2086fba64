"""Pictures in folders: the three layouts, and what is said of others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from data.written_files import write_folder
from lowtide.data.batches import BatchKey
from lowtide.data.images import ImageBatches, ImageFiles
from lowtide.data.load import load_images
from lowtide.errors import ArgumentError, DataError

CLASSES = ("ant", "bee", "cat")


def test_class_folders_alone_are_split_by_file_name(tmp_path: Path) -> None:
    write_folder(tmp_path, CLASSES, per_class=10)
    data = load_images(f"folder:{tmp_path}", image_size=32, validation=0.25)
    assert data.classes == CLASSES
    assert (len(data.train), len(data.validation or ()), len(data.test)) == (18, 6, 6)
    files = {part: {part_files(part)[row] for row in part.rows.tolist()} for part in (data.train, data.test)}
    assert {path.name for path in files[data.test]} == {"004.png", "009.png"}
    assert not files[data.train] & files[data.test]
    batch = data.test[BatchKey(0, tuple(range(6)))]
    assert batch.inputs[0].shape == (6, 3, 32, 32)
    assert batch.target.tolist() == [0, 0, 1, 1, 2, 2]
    # the class is written in the red value: label and picture belong together
    red = batch.inputs[0][:, 0].mean(dim=(1, 2)) * 0.229 + 0.485
    assert torch.allclose(red * 255, 40.0 * batch.target, atol=0.5)


def part_files(part: ImageBatches) -> tuple[Path, ...]:
    assert isinstance(part.source, ImageFiles)
    return part.source.paths


@pytest.mark.parametrize("second", ["test", "val"])
def test_train_and_test_folders(tmp_path: Path, second: str) -> None:
    write_folder(tmp_path / "train", CLASSES, per_class=5)
    write_folder(tmp_path / second, CLASSES, per_class=2)
    data = load_images(f"folder:{tmp_path}", image_size=16, validation=0.0)
    assert len(data.train) == 15
    assert data.validation is None
    assert len(data.test) == 6
    assert all(second in path.parts for path in part_files(data.test))


def test_faults_are_named(tmp_path: Path) -> None:
    def load() -> None:
        load_images(f"folder:{tmp_path / 'd'}", image_size=16)

    with pytest.raises(DataError, match="no such folder"):
        load()
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match="a folder per class with pictures, got Couldn't find any class folder"):
        load()
    write_folder(tmp_path / "d", CLASSES[:1], per_class=3)
    with pytest.raises(DataError, match="5 pictures or more in a class"):
        load()
    (tmp_path / "d" / "empty").mkdir()
    with pytest.raises(DataError, match="Found no valid file for the classes empty"):
        load()
    shutil.rmtree(tmp_path / "d")
    write_folder(tmp_path / "d" / "train", CLASSES, per_class=1)
    with pytest.raises(DataError, match="expected test or val beside train"):
        load()
    write_folder(tmp_path / "d" / "test", CLASSES[:2], per_class=1)
    with pytest.raises(DataError, match="same classes in train and test, got cat in one of them only"):
        load()
    with pytest.raises(ArgumentError, match="--image-size: expected at least 1, got 0"):
        load_images(f"folder:{tmp_path}", image_size=0)


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_a_damaged_picture_is_named_when_it_is_read(tmp_path: Path, content: bytes | None) -> None:
    write_folder(tmp_path, CLASSES, per_class=5)
    path = tmp_path / "bee" / "004.png"
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    data = load_images(f"folder:{tmp_path}", image_size=16)
    with pytest.raises(DataError, match=r"bee/004\.png: expected a readable picture, got "):
        data.test[BatchKey(0, (0, 1, 2))]
