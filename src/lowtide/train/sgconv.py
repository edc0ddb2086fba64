"""Long-convolution models on sequences: the options, and the builders of data, model, optimiser and schedule."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lowtide.data.listops import ListOpsRules
from lowtide.data.load_sequences import LISTOPS, NPZ, load_sequences
from lowtide.data.seeds import derive_seed
from lowtide.data.sequences import SequenceData, SequenceFormat
from lowtide.data.text import TEXT
from lowtide.levels import Level, check_level
from lowtide.models.sequence import SequenceModel
from lowtide.nn import parameter_groups
from lowtide.sgconv_form import Alignment, Combine, Decay, Interpolation
from lowtide.train.checkpoint import load_checkpoint, load_weights
from lowtide.train.loop import Summary
from lowtide.train.options import TrainOptions, choose_device, require
from lowtide.train.report import Reporter
from lowtide.train.run import Run
from lowtide.train.start import Recipe, start
from lowtide.train.trained import read_strings

KIND = "train sgconv"
# of the Long Range Arena recipes where there is one
EPOCHS = {"digits": 30, "fashion-mnist": 20, "cifar10": 200, LISTOPS: 40}
NPZ_EPOCHS = 20
TEXT_EPOCHS = 10


@dataclass(frozen=True)
class SGConvOptions(TrainOptions):
    """Train a long-convolution model (SGConv) on sequences.

    The recipe is that of the paper: AdamW, convolution kernels at a rate of their own and without weight decay, a
    linear warm-up and a cosine to 0, error of the weights after the last epoch.
    """

    data: str = "digits"
    """digits, fashion-mnist or cifar10 (grey pixels row by row), listops, npz:PATH (x, y, perhaps lengths), or
    text:PATH (any file: each byte is predicted from those before it)."""
    data_dir: str | None = None
    """Folder of the data set's files (default: ./data, and Debian's package for fashion-mnist)."""
    download: bool = False
    """Fetch missing files."""
    validation: float = 0.1
    """Fraction of the training rows, or of the text, held out for validation (listops has validation trees)."""
    limit_train: int | None = None
    """Train on so many rows only."""
    limit_test: int | None = None
    """Test on the first so many rows only."""
    image_side: int | None = None
    """Reduce pictures to this side, side^2 positions (default: digits 8, at most 32; fashion-mnist 28; cifar10 32)."""
    listops_length: tuple[int, int] = (500, 2000)
    """Keep trees of more than, and fewer than, so many tokens."""
    listops_trees: tuple[int, int, int] = (96_000, 2_000, 2_000)
    """Training, validation and test trees."""
    listops_seed: int = 0
    """Decides the trees."""
    text_length: int = 512
    """Bytes in a row of a text."""
    epochs: int | None = None
    """Passes over the training data (default: digits 30, fashion-mnist 20, cifar10 200, listops 40, npz 20,
    text 10)."""
    lr: float = 0.01
    """Highest learning rate, of all but the kernels."""
    kernel_lr: float = 0.001
    """Highest learning rate of the convolution kernels, which do not decay."""
    weight_decay: float = 0.05
    """AdamW's, of all but the kernels."""
    warmup: float = 0.1
    """Fraction of the steps in which the rates rise."""
    d_model: int = 32
    """Features."""
    n_layers: int = 4
    """Residual blocks."""
    l_max: int | None = None
    """Length that the kernels should reach (default: that of the longest row)."""
    kernel_dim: int = 32
    """Numbers per piece of a kernel."""
    n_scales: int | None = None
    """Pieces of a kernel (default: as many as reach --l-max)."""
    init_scale: int = 0
    """Doublings of the first piece's stretch."""
    init: Literal["randn", "cos"] = "randn"
    """How the pieces are drawn."""
    combine: Combine = "cat"
    """Pieces end to end, or summed."""
    interpolation: Interpolation = "linear"
    """How a piece is stretched."""
    alignment: Alignment = "half_pixel"
    """Where linear interpolation puts the numbers."""
    decay: Decay = "scale"
    """Weight of a piece by its scale, or of a tap by a power of its distance, fixed or learned."""
    decay_min: float = 2.0
    """Multiplier (or power) of the first feature."""
    decay_max: float = 2.0
    """Multiplier (or power) of the last feature."""
    bidirectional: bool = True
    """Kernels look into the future too; not for a text."""
    glu: bool = True
    """Gate the output map of each layer."""
    prenorm: bool = True
    """Norm before each layer instead of behind it."""
    norm: Literal["batch", "layer"] = "batch"
    """Which norm."""
    dropout: float = 0.0
    """Dropout in each layer."""
    tie_dropout: bool = False
    """One dropout mask for all positions."""
    pool: Literal["mean", "last", "none"] = "mean"
    """Mean of all positions, the last one, or, for a text, none: an output per position."""
    recompute: Level = "pointwise"
    """Memory level: none (plain), pointwise, layer, block. Same numbers, less memory."""

    changeable = TrainOptions.changeable | {"data_dir", "download", "recompute"}

    def check(self) -> None:
        super().check()
        check_level(self.recompute, "--recompute")
        data = f"one of {', '.join(EPOCHS)}, {NPZ}PATH, {TEXT}PATH"
        require(self.data in EPOCHS or self.data.startswith((NPZ, TEXT)), "--data", data, repr(self.data))
        require(self.kernel_lr > 0, "--kernel-lr", "a positive number", self.kernel_lr)
        require(0 <= self.warmup < 1, "--warmup", "a fraction in [0, 1)", self.warmup)
        require(0 <= self.dropout < 1, "--dropout", "a number in [0, 1)", self.dropout)
        require(self.l_max is None or self.l_max >= 1, "--l-max", "at least 1", self.l_max)
        pools = ("mean", "last", "none")
        for name, known in (("pool", pools), ("norm", ("batch", "layer")), ("decay", get_args(Decay))):
            value = getattr(self, name)
            require(value in known, f"--{name}", f"one of {', '.join(known)}", repr(value))
        is_text = self.data.startswith(TEXT)
        outputs = "none for a text (an output per position), mean or last for rows"
        require((self.pool == "none") == is_text, "--pool", outputs, f"{self.pool} for {self.data}")
        causal = "--no-bidirectional for a text: a byte is predicted from those before it"
        require(not (is_text and self.bidirectional), "--data", causal, "--bidirectional")

    def rules(self) -> ListOpsRules:
        """Which ListOps trees."""
        return ListOpsRules(self.listops_seed, *self.listops_length, *self.listops_trees)


def default_epochs(data: str) -> int:
    return EPOCHS.get(data, TEXT_EPOCHS if data.startswith(TEXT) else NPZ_EPOCHS)


def run_name(options: SGConvOptions) -> str:
    """The folder in ./runs that a run takes when none is named."""
    data = Path(options.data.removeprefix(NPZ).removeprefix(TEXT)).stem
    return f"sgconv-{data}-{options.n_layers}x{options.d_model}-seed{options.seed}"


def load_data(options: SGConvOptions, form: SequenceFormat | None = None) -> SequenceData:
    """The data set that the options name, split by their seed; normalised as `form` says, if it is given."""
    return load_sequences(
        options.data,
        root=Path(options.data_dir) if options.data_dir else None,
        download=options.download,
        validation=options.validation,
        limit_train=options.limit_train,
        limit_test=options.limit_test,
        side=options.image_side,
        listops=options.rules(),
        text_length=options.text_length,
        seed=options.seed,
        statistics=(form.mean, form.std) if form else None,
    )


def build_model(options: SGConvOptions, n_classes: int, form: SequenceFormat) -> SequenceModel:
    """The network, with weights drawn from the seed, on its device.

    Raises:
        ArgumentError: an option is out of range.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(options.seed, "weights"))
        model = SequenceModel(
            form.d_input,
            n_classes,
            options.d_model,
            options.n_layers,
            options.l_max or form.length,
            prenorm=options.prenorm,
            norm=options.norm,
            dropout=options.dropout,
            tie_dropout=options.tie_dropout,
            pool=None if options.pool == "none" else options.pool,
            embedding=form.vocabulary,
            recompute=options.recompute,
            kernel_dim=options.kernel_dim,
            n_scales=options.n_scales,
            init_scale=options.init_scale,
            init=options.init,
            combine=options.combine,
            interpolation=options.interpolation,
            alignment=options.alignment,
            decay=options.decay,
            decay_min=options.decay_min,
            decay_max=options.decay_max,
            bidirectional=options.bidirectional,
            postact="glu" if options.glu else None,
        )
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    return model.to(choose_device(options.device), dtype)


def build_optimizer(model: nn.Module, options: SGConvOptions, n_steps: int) -> tuple[AdamW, LambdaLR]:
    """AdamW by `parameter_groups`, and for all groups the same curve: a line up, then a cosine to 0 at `n_steps`."""
    groups = parameter_groups(model, options.lr, options.weight_decay, kernel_lr=options.kernel_lr)
    optimizer = AdamW(groups, lr=options.lr)
    warm = round(options.warmup * n_steps)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, n_steps - warm))))

    return optimizer, LambdaLR(optimizer, factor)


def train_sgconv(options: SGConvOptions, run: Run, *, resume: bool, overwrite: bool, reporter: Reporter) -> Summary:
    """Build everything, then train; what can be refused is refused before the run's folder is touched.

    Raises:
        LowtideError: of the kinds that `load_sequences`, `build_model`, `Run` and `train` raise.
    """
    options.check()
    if options.epochs is None:
        options = dataclasses.replace(options, epochs=default_epochs(options.data))
    recipe = Recipe(
        KIND,
        options.recompute,
        load_data=lambda: load_data(options),
        build_model=lambda data: build_model(options, len(data.classes), data.format),
        build_optimizer=lambda model, n_steps: build_optimizer(model, options, n_steps),
        samples=lambda data: f"rows of up to {data.format.length} positions",
        describe=lambda data: _describe(options, data),
    )
    return start(options, recipe, run, resume=resume, overwrite=overwrite, reporter=reporter)


def _describe(options: SGConvOptions, data: SequenceData) -> dict[str, str]:
    return {
        "kind": KIND,
        "options": options.to_json(),
        "classes": json.dumps(data.classes),
        "format": json.dumps(dataclasses.asdict(data.format)),
    }


@dataclass(frozen=True)
class TrainedSGConv:
    """A model out of a checkpoint, in eval mode, with what it was trained on."""

    model: SequenceModel
    options: SGConvOptions
    classes: tuple[str, ...]
    format: SequenceFormat


def load_trained(path: Path, device: str = "auto", best: bool = False) -> TrainedSGConv:
    """The model of a checkpoint file, or of a run's folder: its last one, or the `best` on the validation part.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of something else than a sequence model.
    """
    if path.is_dir():
        path = Run(path).best if best else Run(path).last
    checkpoint = load_checkpoint(path)
    strings = read_strings(checkpoint, KIND, str(path))
    form = SequenceFormat(**json.loads(strings["format"]))
    classes = tuple(json.loads(strings["classes"]))
    options = dataclasses.replace(SGConvOptions.from_json(strings["options"], str(path)), device=device)
    model = build_model(options, len(classes), form)
    load_weights(model, checkpoint["model"], str(path))
    return TrainedSGConv(model.eval(), options, classes, form)
