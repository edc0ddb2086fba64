"""`lowtide eval`: loss and error of a trained network on a part of a data set."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lowtide.errors import ArgumentError, describe
from lowtide.train.densenet import load_data, load_trained
from lowtide.train.evaluate import evaluate as evaluate_model
from lowtide.train.objective import classification


def evaluate(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    *,
    part: Literal["test", "validation", "train"] = "test",
    best: bool = False,
    data: str | None = None,
    data_dir: str | None = None,
    limit: int | None = None,
    batch_size: int = 256,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Loss and error of a trained network on a part of the data it was trained on, or on another data set.

    Args:
        checkpoint: A run's folder or a checkpoint file.
        part: Which part; the split is that of the training run.
        best: Of a run's folder, take the weights with the least validation error instead of the last ones.
        data: Another data set with the same classes (digits, fashion-mnist, ..., folder:PATH).
        data_dir: Folder of the data set's files.
        limit: Use the first so many test pictures.
        batch_size: Pictures per batch.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        json: Print the result as JSON.
    """
    if batch_size < 1:
        raise ArgumentError(describe(expected="at least 1", got=batch_size, where="--batch-size"))
    trained = load_trained(checkpoint, device, best)
    options = dataclasses.replace(
        trained.options,
        data=data or trained.options.data,
        data_dir=data_dir or trained.options.data_dir,
        limit_test=limit or trained.options.limit_test,
        augment="none",
    )
    found = load_data(options, trained.preprocessing)
    _check_same_task(trained.classes, trained.preprocessing.channels, found.classes, found.preprocessing.channels, data)
    pictures = {"test": found.test, "validation": found.validation, "train": found.train}[part]
    if pictures is None:
        got = "none, as the run held nothing out"
        raise ArgumentError(describe(expected="validation pictures", got=got, where="--part validation"))
    result = evaluate_model(trained.model, pictures, classification, batch_size, options.precision)
    if json:
        print(json_format.dumps({"part": part, **result._asdict()}))
    else:
        print(f"{part} error {result.error_percent:.2f} % (loss {result.loss:.4f}) on {result.n_targets} pictures")


def _check_same_task(
    classes: tuple[str, ...], channels: int, found: tuple[str, ...], found_channels: int, data: str | None
) -> None:
    def say(names: tuple[str, ...], n: int) -> str:
        return (
            f"{n}-channel pictures of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({len(names)} classes)"
        )

    if found != classes or found_channels != channels:
        expected, got = say(classes, channels), say(found, found_channels)
        raise ArgumentError(describe(expected=expected, got=got, where=f"--data {data}"))
