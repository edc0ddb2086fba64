"""What a checkpoint says beside its weights: enough to build the network again and to read a picture for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lowtide.data.images import Preprocessing
from lowtide.errors import CheckpointError, describe
from lowtide.train.options import TrainOptions


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
    strings = checkpoint["description"]
    if strings.get("kind") != kind:
        got = f"one of lowtide {strings.get('kind')}"
        raise CheckpointError(describe(expected=f"a checkpoint of lowtide {kind}", got=got, where=where))
    stored = json.loads(strings["preprocessing"])
    preprocessing = Preprocessing(
        channels=stored["channels"],
        size=tuple(stored["size"]),
        mean=tuple(stored["mean"]),
        std=tuple(stored["std"]),
        photograph=stored["photograph"],
    )
    return strings["options"], tuple(json.loads(strings["classes"])), preprocessing
