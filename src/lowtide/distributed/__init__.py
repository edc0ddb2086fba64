"""More than one process, on `torch.distributed`."""

from lowtide.distributed.sequence import gather_sequence as gather_sequence
from lowtide.distributed.sequence import reduce_gradients as reduce_gradients
from lowtide.distributed.sequence import sequence_parallel as sequence_parallel
from lowtide.distributed.sequence import split_sequence as split_sequence
