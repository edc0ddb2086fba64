"""The functions of streaming: filters, states, blocks of samples."""

from lowtide.lean.sgconv_stream import sgconv_block as sgconv_block
from lowtide.lean.sgconv_stream import sgconv_map as sgconv_map
from lowtide.lean.stream_ring import read as ring_read
from lowtide.lean.stream_ring import write as ring_write
from lowtide.lean.streaming import StreamFilter as StreamFilter
from lowtide.lean.streaming import block as stream_block
from lowtide.lean.streaming import block_length as stream_block_length
from lowtide.lean.streaming import block_rows as stream_block_rows
from lowtide.lean.streaming import initial_state as stream_state
from lowtide.lean.streaming import prepare as stream_filter
from lowtide.lean.streaming import prepare_taps as stream_filter_of_taps
from lowtide.lean.streaming import step as stream_step
from lowtide.lean.streaming import working_numbers as stream_working_numbers
from lowtide.stream_state import State as State
from lowtide.stream_state import clone_state as clone_state
from lowtide.stream_state import map_state as map_state
from lowtide.stream_state import reset_rows as reset_rows

__all__ = [
    "State",
    "StreamFilter",
    "clone_state",
    "map_state",
    "reset_rows",
    "ring_read",
    "ring_write",
    "sgconv_block",
    "sgconv_map",
    "stream_block",
    "stream_block_length",
    "stream_block_rows",
    "stream_filter",
    "stream_filter_of_taps",
    "stream_state",
    "stream_step",
    "stream_working_numbers",
]
