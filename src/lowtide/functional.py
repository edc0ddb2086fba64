"""The public functions: each picks the plain or the lean implementation by `recompute`."""

from lowtide.dense_functions import dense_block as dense_block
from lowtide.dense_functions import stem as stem
from lowtide.dense_functions import transition as transition
from lowtide.norm_act_conv_functions import norm_act_conv as norm_act_conv
from lowtide.sgconv_functions import long_conv as long_conv
