"""The state of every random generator that a model or a data set may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Start all of them anew; `value` is below 2**63."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002


def capture(*, own_gpu: bool = False) -> dict[str, Any]:
    """Plain tensors, numbers and tuples, so that they load without running code; of all GPUs, or of the current one."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the global one is what may be used)
    return {
        "torch": torch.get_rng_state(),
        "cuda": _of_gpus(own_gpu) if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def _of_gpus(own: bool) -> list[torch.Tensor]:
    return [torch.cuda.get_rng_state()] if own else torch.cuda.get_rng_state_all()


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == 1:
        torch.cuda.set_rng_state(state["cuda"][0])
    elif torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
