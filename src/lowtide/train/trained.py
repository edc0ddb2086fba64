"""What a checkpoint says beside its weights: enough to build the network again and to read a picture for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.data.images import Preprocessing
from lowtide.errors import CheckpointError, describe
from lowtide.train.checkpoint import load_checkpoint
from lowtide.train.options import TrainOptions
from lowtide.train.run import Run


def describe_trained(
    kind: str, options: TrainOptions, classes: Sequence[str], preprocessing: Preprocessing
) -> dict[str, str]:
    """The strings that `train` stores in each checkpoint."""
    return {
        "kind": kind,
        "options": options.to_json(),
        "classes": json.dumps(list(classes)),
        "preprocessing": json.dumps(dataclasses.asdict(preprocessing)),
    }


def read_description(checkpoint: dict[str, Any], kind: str, where: str) -> tuple[str, tuple[str, ...], Preprocessing]:
    """Options (JSON), class names and preprocessing out of a checkpoint.

    Raises:
        CheckpointError: it was written by another command than `kind`.
    """
    strings = read_strings(checkpoint, kind, where)
    stored = json.loads(strings["preprocessing"])
    preprocessing = Preprocessing(
        channels=stored["channels"],
        size=tuple(stored["size"]),
        mean=tuple(stored["mean"]),
        std=tuple(stored["std"]),
        photograph=stored["photograph"],
    )
    return strings["options"], tuple(json.loads(strings["classes"])), preprocessing


def read_strings(checkpoint: dict[str, Any], kind: str, where: str) -> dict[str, str]:
    """The description of a checkpoint that the command `kind` wrote.

    Raises:
        CheckpointError: another command wrote it.
    """
    strings = checkpoint["description"]
    if strings.get("kind") != kind:
        got = f"one of lowtide {strings.get('kind')}"
        raise CheckpointError(describe(expected=f"a checkpoint of lowtide {kind}", got=got, where=where))
    return strings


def checkpoint_kind(path: Path, best: bool = False) -> str:
    """Which command wrote the checkpoint file, or that of a run's folder: "train densenet", ...

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if path.is_dir():
        path = Run(path).best if best else Run(path).last
    return load_checkpoint(path)["description"].get("kind", "")
