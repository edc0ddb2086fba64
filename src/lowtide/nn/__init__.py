"""Modules: parameters and buffers; the arithmetic is in `lowtide.functional`."""

from lowtide.functional import clone_state as clone_state
from lowtide.functional import reset_rows as reset_rows
from lowtide.nn.batch_norm import SyncBatchNorm as SyncBatchNorm
from lowtide.nn.dense import DenseBlock as DenseBlock
from lowtide.nn.dense import DenseLayer as DenseLayer
from lowtide.nn.dense import Transition as Transition
from lowtide.nn.densely_connected import DenselyConnected as DenselyConnected
from lowtide.nn.parameter_groups import parameter_groups as parameter_groups
from lowtide.nn.sgconv import SGConv as SGConv
