"""More than one process, on `torch.distributed`: the names below are imported when they are first asked for, since FSDP
and distributed checkpoints take long to import and a run of one process needs neither."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.distributed.sequence import gather_sequence as gather_sequence
    from lowtide.distributed.sequence import reduce_gradients as reduce_gradients
    from lowtide.distributed.sequence import sequence_parallel as sequence_parallel
    from lowtide.distributed.sequence import split_sequence as split_sequence
    from lowtide.distributed.sharded import shard as shard
    from lowtide.distributed.sharded_checkpoint import load_sharded as load_sharded
    from lowtide.distributed.sharded_checkpoint import save_sharded as save_sharded

_WHERE = {
    "gather_sequence": "sequence",
    "load_sharded": "sharded_checkpoint",
    "reduce_gradients": "sequence",
    "save_sharded": "sharded_checkpoint",
    "sequence_parallel": "sequence",
    "shard": "sharded",
    "split_sequence": "sequence",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
