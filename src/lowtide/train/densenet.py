"""DenseNets on images: the options, and the builders that turn them into data, model, optimiser and schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

from lowtide.data.images import ImageData, Preprocessing
from lowtide.data.load import FOLDER, Augment, image_spec, load_images
from lowtide.data.seeds import derive_seed
from lowtide.errors import ArgumentError, describe
from lowtide.levels import Level, check_level
from lowtide.models import densenet as networks
from lowtide.models.densenet import DenseNet
from lowtide.train.checkpoint import load_checkpoint, load_weights
from lowtide.train.loop import Summary
from lowtide.train.options import TrainOptions, choose_device, require
from lowtide.train.report import Reporter
from lowtide.train.run import Run
from lowtide.train.start import Recipe, start
from lowtide.train.trained import describe_trained, read_description

KIND = "train densenet"
Architecture = Literal["bc", "densenet121", "densenet161", "densenet169", "densenet201", "densenet264"]
FOLDER_EPOCHS = 90  # the published recipe for ImageNet


@dataclass(frozen=True)
class DenseNetOptions(TrainOptions):
    """Train a DenseNet on images.

    The recipe is that of the paper: SGD with Nesterov momentum 0.9, weight decay 1e-4, learning rate 0.1 divided by 10
    at 50 % and 75 % of the steps, He initialisation, standard augmentation, error of the weights after the last epoch.
    """

    data: str = "digits"
    """digits, fashion-mnist, cifar10, cifar100, svhn, or folder:PATH (pictures in a folder per class)."""
    data_dir: str | None = None
    """Folder of the data set's files (default: ./data, and Debian's package for fashion-mnist)."""
    download: bool = False
    """Fetch missing files."""
    validation: float = 0.1
    """Fraction of the training pictures held out for validation."""
    limit_train: int | None = None
    """Train on so many pictures only."""
    limit_test: int | None = None
    """Test on the first so many pictures only."""
    augment: Augment = "standard"
    """standard (crop and mirror, as the data set allows) or none."""
    image_size: int = 224
    """Side of the crop taken from photographs (folder:PATH)."""
    arch: Architecture = "bc"
    """bc (three blocks, by --depth and --growth-rate), or densenet121, 161, 169, 201, 264."""
    depth: int = 40
    """Layers of the bc network: 6n + 4, or 3n + 4 without bottleneck."""
    growth_rate: int = 12
    """Channels that each layer of the bc network adds."""
    compression: float = 0.5
    """Fraction of the channels that a transition of the bc network keeps."""
    bottleneck: bool = True
    """1x1 convolutions to 4 growth rates before the 3x3 ones."""
    small_inputs: bool | None = None
    """A 3x3 stem without pooling (default: yes for bc, no for the others)."""
    drop_rate: float = 0.0
    """Dropout after each layer (the paper: 0.2 without augmentation)."""
    channels_last: bool = False
    """Store convolution weights and maps channels-last (faster on some machines; rounding differs)."""
    momentum: float = 0.9
    """Nesterov momentum."""
    recompute: Level = "pointwise"
    """Memory level: none (plain), pointwise, layer, block. Same numbers, less memory."""

    changeable = TrainOptions.changeable | {"data_dir", "download", "recompute", "channels_last"}

    def check(self) -> None:
        super().check()
        check_level(self.recompute, "--recompute")
        known = get_args(Architecture)
        require(self.arch in known, "--arch", f"one of {', '.join(known)}", repr(self.arch))
        require(0 <= self.drop_rate < 1, "--drop-rate", "a number in [0, 1)", self.drop_rate)
        require(0 <= self.momentum < 1, "--momentum", "a number in [0, 1)", self.momentum)
        require(self.augment in get_args(Augment), "--augment", f"one of {', '.join(get_args(Augment))}", self.augment)


def default_epochs(data: str) -> int:
    """Of the data set's published recipe, where it has one."""
    return FOLDER_EPOCHS if data.startswith(FOLDER) else image_spec(data).epochs


def run_name(options: DenseNetOptions) -> str:
    """The folder in ./runs that a run takes when none is named."""
    data = Path(options.data.removeprefix(FOLDER)).name
    network = options.arch if options.arch != "bc" else f"bc{options.depth}-k{options.growth_rate}"
    return f"densenet-{data}-{network}-seed{options.seed}"


def load_data(options: DenseNetOptions, preprocessing: Preprocessing | None = None) -> ImageData:
    """The data set that the options name, split by their seed; normalised as `preprocessing` says, if it is given."""
    return load_images(
        options.data,
        root=Path(options.data_dir) if options.data_dir else None,
        download=options.download,
        validation=options.validation,
        limit_train=options.limit_train,
        limit_test=options.limit_test,
        augment=options.augment,
        image_size=options.image_size,
        seed=options.seed,
        statistics=(preprocessing.mean, preprocessing.std) if preprocessing else None,
    )


def build_model(options: DenseNetOptions, n_classes: int, preprocessing: Preprocessing) -> DenseNet:
    """The network, with weights drawn from the seed, on its device.

    Raises:
        ArgumentError: an option is out of range, or the pictures are too small for the network.
    """
    small_inputs = options.arch == "bc" if options.small_inputs is None else options.small_inputs
    bn_size = 4 if options.bottleneck else None
    # the weights come from a stream of their own, so they do not depend on what was drawn before; the caller's is kept
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(options.seed, "weights"))
        if options.arch == "bc":
            model = networks.densenet_bc(
                options.depth,
                options.growth_rate,
                n_classes,
                compression=options.compression,
                bn_size=bn_size,
                drop_rate=options.drop_rate,
                small_inputs=small_inputs,
                in_channels=preprocessing.channels,
                recompute=options.recompute,
            )
        else:
            model = getattr(networks, options.arch)(
                n_classes,
                bn_size=bn_size,
                drop_rate=options.drop_rate,
                small_inputs=small_inputs,
                in_channels=preprocessing.channels,
                recompute=options.recompute,
            )
    height, width = preprocessing.size
    if min(height, width) < model.minimum_size:
        raise ArgumentError(
            describe(
                expected=f"pictures of at least {model.minimum_size} x {model.minimum_size} for this network",
                got=f"{height} x {width}",
                where=f"--data {options.data}",
                fix="use --arch bc, --small-inputs True or a larger --image-size",
            )
        )
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    model = model.to(choose_device(options.device), dtype)
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def build_optimizer(model: nn.Module, options: DenseNetOptions, n_steps: int) -> tuple[SGD, MultiStepLR]:
    """Nesterov SGD, its rate divided by 10 after 50 % and 75 % of `n_steps`; all parameters decay, as in the paper."""
    nesterov = options.momentum > 0
    optimizer = SGD(
        model.parameters(), options.lr, momentum=options.momentum, weight_decay=options.weight_decay, nesterov=nesterov
    )
    return optimizer, MultiStepLR(optimizer, [n_steps // 2, n_steps * 3 // 4], gamma=0.1)


def train_densenet(options: DenseNetOptions, run: Run, *, resume: bool, overwrite: bool, reporter: Reporter) -> Summary:
    """Build everything, then train; what can be refused is refused before the run's folder is touched.

    Raises:
        LowtideError: of the kinds that `load_images`, `build_model`, `Run` and `train` raise.
    """
    options.check()
    if options.epochs is None:
        options = dataclasses.replace(options, epochs=default_epochs(options.data))
    recipe = Recipe(
        KIND,
        options.recompute,
        load_data=lambda: load_data(options),
        build_model=lambda data: build_model(options, len(data.classes), data.preprocessing),
        build_optimizer=lambda model, n_steps: build_optimizer(model, options, n_steps),
        samples=lambda data: "pictures",
        describe=lambda data: describe_trained(KIND, options, data.classes, data.preprocessing),
    )
    return start(options, recipe, run, resume=resume, overwrite=overwrite, reporter=reporter)


@dataclass(frozen=True)
class TrainedDenseNet:
    """A network out of a checkpoint, in eval mode, with what it was trained on."""

    model: DenseNet
    options: DenseNetOptions
    classes: tuple[str, ...]
    preprocessing: Preprocessing


def load_trained(path: Path, device: str = "auto", best: bool = False) -> TrainedDenseNet:
    """The network of a checkpoint file, or of a run's folder: its last one, or the `best` on the validation part.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of something else than a DenseNet.
    """
    if path.is_dir():
        run = Run(path)
        path = run.best if best else run.last
    checkpoint = load_checkpoint(path)
    text, classes, preprocessing = read_description(checkpoint, KIND, str(path))
    options = dataclasses.replace(DenseNetOptions.from_json(text, str(path)), device=device)
    model = build_model(options, len(classes), preprocessing)
    load_weights(model, checkpoint["model"], str(path))
    return TrainedDenseNet(model.eval(), options, classes, preprocessing)
