"""The six rows of the paper's table for the Long Range Arena, as options of `lowtide train sgconv`.

All are two-sided with a gated output map, kernels at a rate of 0.001, a cosine with warm-up. The published accuracies
(percent): ListOps 61.45, Text 89.20, Retrieval 91.11, Image 87.97, Pathfinder 95.46, Path-X 97.83.
ListOps and Image have their data built in. Text, Retrieval, Pathfinder and Path-X take --data npz:PATH. Retrieval is
one sequence in, one class out here: the arena's matching of two documents is not built.

Source: Li et al. 2022, arXiv 2210.09298, appendix (hyperparameters).
"""

from __future__ import annotations

from typing import Literal

from lowtide.data.load_sequences import LISTOPS
from lowtide.train.sgconv import SGConvOptions

Preset = Literal["lra-listops", "lra-text", "lra-retrieval", "lra-image", "lra-pathfinder", "lra-path-x"]

# no data set is built in: the check of the options asks for one
OWN_DATA = ""

PRESETS: dict[Preset, SGConvOptions] = {
    "lra-listops": SGConvOptions(
        data=LISTOPS, l_max=2048, n_layers=8, d_model=128, prenorm=False, norm="batch", kernel_dim=1, n_scales=12,
        lr=0.01, weight_decay=0.05, batch_size=50, epochs=40,
    ),
    "lra-text": SGConvOptions(
        data=OWN_DATA, l_max=4096, n_layers=6, d_model=256, prenorm=True, norm="batch", kernel_dim=2, n_scales=12,
        lr=0.01, weight_decay=0.05, batch_size=16, epochs=32,
    ),
    "lra-retrieval": SGConvOptions(
        data=OWN_DATA, l_max=4000, n_layers=6, d_model=256, prenorm=True, norm="batch", kernel_dim=1, n_scales=13,
        lr=0.01, weight_decay=0.05, batch_size=32, epochs=20,
    ),
    "lra-image": SGConvOptions(
        data="cifar10", l_max=1024, n_layers=6, d_model=512, prenorm=False, norm="layer", kernel_dim=32, n_scales=6,
        decay="power_fixed", decay_min=1.0, decay_max=1.0, dropout=0.2, tie_dropout=True,
        lr=0.01, weight_decay=0.05, batch_size=50, epochs=200,
    ),
    "lra-pathfinder": SGConvOptions(
        data=OWN_DATA, l_max=1024, n_layers=6, d_model=256, prenorm=True, norm="batch", kernel_dim=32, n_scales=6,
        dropout=0.2, lr=0.004, weight_decay=0.03, batch_size=64, epochs=200,
    ),
    "lra-path-x": SGConvOptions(
        data=OWN_DATA, l_max=16384, n_layers=6, d_model=256, prenorm=True, norm="batch", kernel_dim=64, n_scales=8,
        init_scale=1, init="cos", decay_min=1.0, decay_max=3.0, lr=0.004, weight_decay=0.03, batch_size=16, epochs=50,
    ),
}  # fmt: skip
