"""`lowtide eval`: loss and error of a trained network on a part of a data set."""

from __future__ import annotations

import dataclasses
import json as json_format
from pathlib import Path
from typing import Annotated, Literal

import tyro
from torch import nn

from lowtide.data.batches import BatchDataset
from lowtide.data.sequences import SequenceFormat
from lowtide.errors import ArgumentError, describe
from lowtide.train import densenet, sgconv
from lowtide.train.evaluate import evaluate as evaluate_model
from lowtide.train.objective import classification, say_loss
from lowtide.train.options import Precision
from lowtide.train.trained import checkpoint_kind


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
        data: Another data set with the same classes (digits, fashion-mnist, ..., folder:PATH, npz:PATH,
            text:PATH).
        data_dir: Folder of the data set's files.
        limit: Use the first so many test samples.
        batch_size: Samples per batch.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        json: Print the result as JSON.
    """
    if batch_size < 1:
        raise ArgumentError(describe(expected="at least 1", got=batch_size, where="--batch-size"))
    kind = checkpoint_kind(checkpoint, best)
    choose = {densenet.KIND: _pictures, sgconv.KIND: _rows}.get(kind, _pictures)
    model, samples, precision, unit = choose(checkpoint, part, best, data, data_dir, limit, device)
    if samples is None:
        got = "none, as the run held nothing out"
        raise ArgumentError(describe(expected=f"validation {unit}", got=got, where="--part validation"))
    result = evaluate_model(model, samples, classification, batch_size, precision)
    if json:
        print(json_format.dumps({"part": part, **result._asdict()}))
    else:
        loss = say_loss(result.loss, unit)
        print(f"{part} error {result.error_percent:.2f} % ({loss}) on {result.n_targets} {unit}")


Part = Literal["test", "validation", "train"]
Chosen = tuple[nn.Module, BatchDataset | None, Precision, str]


def _pictures(
    checkpoint: Path, part: Part, best: bool, data: str | None, data_dir: str | None, limit: int | None, device: str
) -> Chosen:
    trained = densenet.load_trained(checkpoint, device, best)
    options = dataclasses.replace(
        trained.options,
        data=data or trained.options.data,
        data_dir=data_dir or trained.options.data_dir,
        limit_test=limit or trained.options.limit_test,
        augment="none",
    )
    found = densenet.load_data(options, trained.preprocessing)
    _check_same_task(trained.classes, trained.preprocessing.channels, found.classes, found.preprocessing.channels, data)
    return trained.model, getattr(found, part), options.precision, "pictures"


def _rows(
    checkpoint: Path, part: Part, best: bool, data: str | None, data_dir: str | None, limit: int | None, device: str
) -> Chosen:
    trained = sgconv.load_trained(checkpoint, device, best)
    options = dataclasses.replace(
        trained.options,
        data=data or trained.options.data,
        data_dir=data_dir or trained.options.data_dir,
        limit_test=limit or trained.options.limit_test,
    )
    found = sgconv.load_data(options, trained.format)
    own, other = trained.format, found.format
    # a file of one's own may lack the last class or token
    more = len(found.classes) > len(trained.classes) or (other.vocabulary or 0) > (own.vocabulary or 0)
    kinds = [(form.d_input, form.vocabulary is None, form.per_position) for form in (own, other)]
    if more or kinds[0] != kinds[1]:

        def say(form: SequenceFormat, classes: tuple[str, ...]) -> str:
            what = f"{form.vocabulary} tokens" if form.vocabulary else f"{form.d_input} numbers per position"
            return f"{what} and {len(classes)} classes{' for each position' if form.per_position else ''}"

        expected, got = say(own, trained.classes), say(other, found.classes)
        raise ArgumentError(describe(expected=expected, got=got, where=f"--data {options.data}"))
    return trained.model, getattr(found, part), options.precision, "bytes" if own.per_position else "rows"


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
