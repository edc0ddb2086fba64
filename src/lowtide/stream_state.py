"""The state of a stream as a plain tree of tensors: copying it, and starting rows anew.

Every tensor with rows of a batch has them on axis 1, behind the time slots: (slots, B, ...). A tensor without
dimensions is a counter common to all rows. So a state goes through `torch.save`, `torch.load(weights_only=True)` and
`.to(device)` leaf by leaf, and a row starts anew by being zero: there is nothing else to know about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, describe

State = dict[str, Any]


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same tree with `function` of each tensor: `map_state(lambda x: x.to("cuda"), state)` moves a stream."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {name: map_state(function, value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map_state(function, value) for value in state)
    if state is None:
        return None
    got = f"a {type(state).__name__}"
    raise ArgumentError(describe(expected="a state of dicts, lists, tuples and tensors", got=got, where="stream state"))


def clone_state(state: Any) -> Any:
    """A copy that shares no memory: step the copy, and the original stays where it is."""
    return map_state(Tensor.clone, state)


def reset_rows(state: Any, mask: Tensor) -> Any:
    """Make the rows where `mask` is True start anew: zero history, in place. Returns `state`.

    Args:
        state: the state of a layer or of a model.
        mask: (B,) bool.

    Raises:
        ArgumentError: `mask` is not bool, or its length is not the state's batch size; nothing is changed then.
    """

    def check(leaf: Tensor) -> Tensor:
        if leaf.dim() >= 2 and (mask.dtype != torch.bool or mask.shape != leaf.shape[1:2]):
            got = f"{tuple(mask.shape)} {str(mask.dtype).removeprefix('torch.')}"
            raise ArgumentError(describe(expected=f"a bool mask ({leaf.shape[1]},)", got=got, where="reset_rows"))
        return leaf

    def reset(leaf: Tensor) -> Tensor:
        if leaf.dim() >= 2:
            leaf[:, mask.to(leaf.device)] = 0
        return leaf

    map_state(check, state)
    map_state(reset, state)
    return state
