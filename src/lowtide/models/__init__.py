"""Whole networks."""

from lowtide.models.densenet import DenseNet as DenseNet
from lowtide.models.densenet import densenet121 as densenet121
from lowtide.models.densenet import densenet161 as densenet161
from lowtide.models.densenet import densenet169 as densenet169
from lowtide.models.densenet import densenet201 as densenet201
from lowtide.models.densenet import densenet264 as densenet264
from lowtide.models.densenet import densenet_bc as densenet_bc
from lowtide.models.sequence import SequenceModel as SequenceModel
