"""The public functions: each picks the plain or the lean implementation by `recompute`."""

from lowtide.dense_functions import dense_block as dense_block
from lowtide.dense_functions import stem as stem
from lowtide.dense_functions import transition as transition
from lowtide.densely_connected_functions import densely_connected as densely_connected
from lowtide.lean.recomputed import recomputed as recomputed
from lowtide.lean.sequence_norm import sequence_norm as sequence_norm
from lowtide.norm_act_conv_functions import norm_act_conv as norm_act_conv
from lowtide.sgconv_functions import kernel_norm as kernel_norm
from lowtide.sgconv_functions import long_conv as long_conv
from lowtide.sgconv_functions import sgconv as sgconv
from lowtide.sgconv_functions import sgconv_kernel as sgconv_kernel
from lowtide.stream_functions import State as State
from lowtide.stream_functions import StreamFilter as StreamFilter
from lowtide.stream_functions import clone_state as clone_state
from lowtide.stream_functions import map_state as map_state
from lowtide.stream_functions import reset_rows as reset_rows
from lowtide.stream_functions import sgconv_block as sgconv_block
from lowtide.stream_functions import sgconv_map as sgconv_map
from lowtide.stream_functions import stream_block as stream_block
from lowtide.stream_functions import stream_block_length as stream_block_length
from lowtide.stream_functions import stream_block_rows as stream_block_rows
from lowtide.stream_functions import stream_filter as stream_filter
from lowtide.stream_functions import stream_filter_of_taps as stream_filter_of_taps
from lowtide.stream_functions import stream_state as stream_state
from lowtide.stream_functions import stream_step as stream_step
from lowtide.stream_functions import stream_working_numbers as stream_working_numbers
