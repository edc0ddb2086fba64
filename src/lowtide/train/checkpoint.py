"""Checkpoints: written whole or not at all, read without running code, and checked against the network they go into."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import __version__
from lowtide.errors import CheckpointError, describe
from lowtide.train.files import ErrorKeepingWriter, replacing

FORMAT = "lowtide checkpoint"
VERSION = 1


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (tensors, numbers, strings, containers of them) to `path` in one move.

    Raises:
        CheckpointError: the disk is full or not writable; an earlier file at `path` is unharmed.
    """
    header = {"format": FORMAT, "version": VERSION, "lowtide": __version__, "torch": str(torch.__version__)}
    with replacing(path) as file:
        writer = ErrorKeepingWriter(file)
        try:
            torch.save(header | content, writer)  # pyright: ignore[reportArgumentType] (write and flush are all it calls)
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, onto the CPU.

    Raises:
        CheckpointError: no such file, a damaged one, or not one of ours.
    """
    if not path.is_file():
        raise CheckpointError(describe(expected="a checkpoint", got="no such file", where=str(path)))
    try:
        # torch itself does not compare the checksums that it writes
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        got = f"{path.stat().st_size} bytes that do not read ({reason})"
        raise CheckpointError(describe(expected="a whole checkpoint", got=got, where=str(path))) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(describe(expected=f"a {FORMAT}", got="another kind of file", where=str(path)))
    if content["version"] > VERSION:
        got = f"version {content['version']}, written by lowtide {content['lowtide']}"
        fix = "use that version of lowtide"
        raise CheckpointError(describe(expected=f"version {VERSION} or earlier", got=got, where=str(path), fix=fix))
    return content


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load parameters and buffers that must fit exactly.

    Raises:
        CheckpointError: names or shapes differ: it is a checkpoint of another network. The model is unchanged.
    """
    own = model.state_dict()
    missing, unexpected = [k for k in own if k not in weights], [k for k in weights if k not in own]
    reshaped = [k for k, value in own.items() if k in weights and weights[k].shape != value.shape]
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors missing, such as {missing[0]}")
    if unexpected:
        faults.append(f"{len(unexpected)} it does not have, such as {unexpected[0]}")
    if reshaped:
        name = reshaped[0]
        shapes = f"{tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        faults.append(f"{len(reshaped)} of another shape, such as {name} {shapes}")
    if faults:
        raise CheckpointError(
            describe(
                expected=f"the {len(own)} tensors of this {type(model).__name__}",
                got="; ".join(faults),
                where=where,
                fix="it is a checkpoint of another network",
            )
        )
    model.load_state_dict(weights)
