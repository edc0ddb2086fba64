"""Modules: parameters and buffers; the arithmetic is in `lowtide.functional`."""

from lowtide.nn.dense import DenseBlock as DenseBlock
from lowtide.nn.dense import DenseLayer as DenseLayer
from lowtide.nn.dense import Transition as Transition
