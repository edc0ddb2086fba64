"""`lowtide predict`: the likeliest classes of picture files."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import torch
import tyro

from lowtide.data.images import prepare_image
from lowtide.errors import ArgumentError, describe
from lowtide.train.densenet import load_trained
from lowtide.train.evaluate import model_device


def predict(
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
    pictures: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PICTURE...")],
    *,
    top: int = 3,
    best: bool = False,
    device: str = "auto",
    json: bool = False,
) -> None:
    """The likeliest classes of picture files, by a trained network.

    Args:
        checkpoint: A run's folder or a checkpoint file.
        pictures: Picture files of any size; they are read as the training pictures were.
        top: How many classes for each.
        best: Of a run's folder, take the weights with the least validation error instead of the last ones.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        json: Print one JSON object: a list of [class, probability] for each file.
    """
    if top < 1 or not pictures:
        what = "--top" if top < 1 else "PICTURE"
        raise ArgumentError(describe(expected="at least 1", got=top if top < 1 else "none", where=what))
    trained = load_trained(checkpoint, device, best)
    dtype = next(trained.model.parameters()).dtype
    answers: dict[str, list[tuple[str, float]]] = {}
    for path in pictures:
        x = prepare_image(path, trained.preprocessing).unsqueeze(0)
        with torch.no_grad():
            logits = trained.model(x.to(model_device(trained.model), dtype))
        values, classes = logits.softmax(dim=1).squeeze(0).topk(min(top, len(trained.classes)))
        answers[str(path)] = [
            (trained.classes[i], value) for i, value in zip(classes.tolist(), values.tolist(), strict=True)
        ]
    if json:
        print(json_format.dumps(answers))
        return
    for name, answer in answers.items():
        print(f"{name}: " + ", ".join(f"{label} {100 * value:.1f} %" for label, value in answer))
