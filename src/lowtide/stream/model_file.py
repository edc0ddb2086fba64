"""One SGConv layer in a file: its options and its state dict, nothing that has to be unpickled as code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentError, CheckpointError, describe
from lowtide.nn import SGConv

KEYS = ("sgconv", "dtype", "state_dict")


def layer_options(layer: SGConv) -> dict[str, Any]:
    """The keyword arguments that build a layer of the same form."""
    form, kernel = layer.form, layer.form.kernel
    return {
        "d_model": layer.d_model,
        "l_max": layer.l_max,
        "kernel_dim": kernel.kernel_dim,
        "n_scales": kernel.n_scales,
        "init_scale": kernel.init_scale,
        "channels": form.channels,
        "bidirectional": form.bidirectional,
        "combine": kernel.combine,
        "interpolation": kernel.interpolation,
        "alignment": kernel.alignment,
        "decay": kernel.decay,
        "activation": form.activation,
        "postact": form.postact,
        "dropout": form.drop_rate,
        "tie_dropout": form.drop_channels and not form.transposed,
        "norm": form.norm_eps is not None,
        "linear": form.linear,
        "transposed": form.transposed,
        "recompute": layer.recompute,
    }


def save_layer(layer: SGConv, path: Path) -> None:
    """Write the layer to `path`, at once or not at all."""
    beside = path.with_name(f"{path.name}.partial")
    dtype = str(layer.D.dtype).removeprefix("torch.")
    torch.save({"sgconv": layer_options(layer), "dtype": dtype, "state_dict": layer.state_dict()}, beside)
    os.replace(beside, path)


def load_layer(path: Path) -> SGConv:
    """Read what `save_layer` wrote; in eval mode, on the CPU.

    Raises:
        CheckpointError: no such file, damaged, or of something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(describe(expected="a file", got=error.strerror, where=str(path))) from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        got = f"something else ({str(error).splitlines()[0]})"
        raise CheckpointError(describe(expected="a layer saved by save_layer", got=got, where=str(path))) from None
    if not isinstance(content, dict) or set(content) != set(KEYS):
        got = f"keys {sorted(map(str, content))}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(describe(expected=f"keys {', '.join(KEYS)}", got=got, where=str(path)))
    try:
        layer = SGConv(**content["sgconv"]).to(getattr(torch, content["dtype"]))
        layer.load_state_dict(content["state_dict"])
    except (TypeError, RuntimeError, AttributeError, ArgumentError) as error:
        got = str(error).splitlines()[0]
        raise CheckpointError(
            describe(expected="the options and weights of one layer", got=got, where=str(path))
        ) from None
    return layer.eval()
