"""Options of `lowtide train sgconv` by name: the Long Range Arena as in the paper's table, and byte-level text models.

Those of the arena are two-sided with a gated output map, kernels at a rate of 0.001, a cosine with warm-up. The
published accuracies (percent): ListOps 61.45, Text 89.20, Retrieval 91.11, Image 87.97, Pathfinder 95.46, Path-X 97.83.
ListOps and Image have their data built in. Text, Retrieval, Pathfinder and Path-X take --data npz:PATH. Retrieval is
one sequence in, one class out here: the arena's matching of two documents is not built.

The text models are causal and made for two CPU cores; their sizes are our own choice, and were not tuned.

Source: Li et al. 2022, arXiv 2210.09298, appendix (hyperparameters).
"""

from __future__ import annotations

from typing import Literal

from lowtide.data.load_sequences import LISTOPS
from lowtide.train.sgconv import SGConvOptions

Preset = Literal[
    "lra-listops", "lra-text", "lra-retrieval", "lra-image", "lra-pathfinder", "lra-path-x", "text", "text-large"
]  # fmt: skip

# no data set is built in: the check of the options asks for one
OWN_DATA = ""
# what --data text:PATH starts from where no preset is named
TEXT_PRESET: Preset = "text"

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
    "text": SGConvOptions(
        data=OWN_DATA, bidirectional=False, pool="none", text_length=512, n_layers=4, d_model=128, prenorm=True,
        norm="layer", kernel_dim=16, lr=0.005, weight_decay=0.01, batch_size=16, eval_batch_size=32,
    ),
    "text-large": SGConvOptions(
        data=OWN_DATA, bidirectional=False, pool="none", text_length=2048, n_layers=8, d_model=384, prenorm=True,
        norm="layer", kernel_dim=32, lr=0.002, weight_decay=0.01, batch_size=16, eval_batch_size=16,
    ),
}  # fmt: skip
