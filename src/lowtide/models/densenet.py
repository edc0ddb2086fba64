"""DenseNet in one, two and three dimensions; parameter names as torchvision's, so that its weights load.

    from lowtide.models import densenet_bc
    model = densenet_bc(100, 12)          # 769,162 parameters, CIFAR-sized images
    model.set_recompute("layer")          # same numbers, less memory

Source: Huang et al. 2017, arXiv 1608.06993 (architecture, table 1); He et al. 2015, arXiv 1502.01852 (initialisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.levels import Level, check_level
from lowtide.models.features import DenseFeatures, stem_modules
from lowtide.nn.dense import CONV, MAX_POOL, NORM, DenseBlock, Transition, check_positive, check_spatial_dims

Init = Literal["fan_out", "fan_in"]


class DenseNet(nn.Module):
    """`features` (stem, dense blocks, transitions, norm5) - relu - global average pool - `classifier`.

    Args:
        growth_rate: k, the channels that each layer adds.
        block_config: layers per dense block.
        compression: theta; a transition keeps int(theta * channels).
        num_init_features: channels of the stem.
        bn_size: bottleneck width in units of k; None for layers without bottleneck.
        drop_rate: dropout after each dense layer.
        small_inputs: stem conv0 (3x3, stride 1) alone; otherwise conv0 (7x7, stride 2), norm0, relu0, pool0.
        in_channels, spatial_dims: the image is (N, in_channels, *S) with 1, 2 or 3 spatial axes.
        recompute: memory level, see `lowtide.levels`; `set_recompute` changes it at any time.
        init: He initialisation with "fan_out" (the paper's code) or "fan_in" (torchvision's DenseNet).

    Raises:
        ArgumentError: an argument is out of range, or an image has too few pixels for the pooling stages.
    """

    def __init__(
        self,
        growth_rate: int = 12,
        block_config: Sequence[int] = (16, 16, 16),
        compression: float = 0.5,
        num_init_features: int = 24,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        num_classes: int = 10,
        small_inputs: bool = True,
        in_channels: int = 3,
        spatial_dims: int = 2,
        recompute: Level = "pointwise",
        *,
        init: Init = "fan_out",
    ) -> None:
        super().__init__()
        where = "DenseNet"
        check_spatial_dims(spatial_dims, where)
        check_positive(growth_rate, "growth_rate", where)
        check_positive(num_init_features, "num_init_features", where)
        check_positive(num_classes, "num_classes", where)
        check_positive(in_channels, "in_channels", where)
        if not 0.0 < compression <= 1.0:
            raise ArgumentError(describe(expected="compression in (0, 1]", got=repr(compression), where=where))
        if len(block_config) == 0:
            raise ArgumentError(describe(expected="block_config with at least one block", got="()", where=where))
        if init not in ("fan_out", "fan_in"):
            raise ArgumentError(describe(expected="init to be one of fan_out, fan_in", got=repr(init), where=where))
        check_level(recompute, where)

        self.spatial_dims = spatial_dims
        self.in_channels = in_channels
        conv, norm, pool = CONV[spatial_dims], NORM[spatial_dims], MAX_POOL[spatial_dims]
        stem = stem_modules(conv, norm, pool, in_channels, num_init_features, small_inputs)
        self.features = DenseFeatures(stem, recompute=recompute)
        channels = num_init_features
        for i, num_layers in enumerate(block_config, start=1):
            block = DenseBlock(
                num_layers, channels, bn_size, growth_rate, drop_rate, spatial_dims=spatial_dims, recompute=recompute
            )
            self.features.add_module(f"denseblock{i}", block)
            channels += num_layers * growth_rate
            if i < len(block_config):
                kept = max(1, int(channels * compression))
                transition = Transition(channels, kept, spatial_dims=spatial_dims, recompute=recompute)
                self.features.add_module(f"transition{i}", transition)
                channels = kept
        self.features.add_module("norm5", norm(channels))
        self.classifier = nn.Linear(channels, num_classes)
        # each stride and each pool of 2 halves the image, rounding down after the stem and up inside it
        self.minimum_size = 2 ** (len(block_config) - 1) * (1 if small_inputs else 4) - (0 if small_inputs else 3)
        self.register_load_state_dict_pre_hook(_accept_other_spellings)
        self.reset_parameters(init)

    def reset_parameters(self, init: Init = "fan_out") -> None:
        """He-normal convolutions, unit batch norms, zero classifier bias."""
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, mode=init, nonlinearity="relu")
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def set_recompute(self, level: Level) -> None:
        """Change what is kept for backward in every block; nothing else changes."""
        check_level(level, "DenseNet.set_recompute")
        for module in self.modules():
            if isinstance(module, DenseBlock | Transition | DenseFeatures):
                module.recompute = level

    def forward(self, x: Tensor) -> Tensor:
        self._check_image(x)
        return self.classifier(self.features.pooled(x))

    def _check_image(self, x: Tensor) -> None:
        if x.dim() != self.spatial_dims + 2 or x.shape[1] != self.in_channels:
            shape = ", ".join(["N", str(self.in_channels), *"DHW"[-self.spatial_dims :]])
            raise ArgumentError(describe(expected=f"images ({shape})", got=str(tuple(x.shape)), where="DenseNet"))
        if min(x.shape[2:]) < self.minimum_size:
            raise ArgumentError(
                describe(
                    expected=f"images of at least {self.minimum_size} pixels along each axis",
                    got=str(tuple(x.shape)),
                    where="DenseNet",
                    fix="use larger images, fewer blocks, or small_inputs=True",
                )
            )


def _accept_other_spellings(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The classifier may be called class_layers.out (MONAI)."""
    other = f"{prefix}class_layers.out."
    for key in [k for k in state_dict if k.startswith(other)]:
        state_dict[f"{prefix}classifier.{key[len(other) :]}"] = state_dict.pop(key)


def densenet_bc(
    depth: int,
    growth_rate: int,
    num_classes: int = 10,
    *,
    compression: float = 0.5,
    num_init_features: int | None = None,
    bn_size: int | None = 4,
    drop_rate: float = 0.0,
    small_inputs: bool = True,
    in_channels: int = 3,
    spatial_dims: int = 2,
    recompute: Level = "pointwise",
) -> DenseNet:
    """The CIFAR networks: three equal blocks, 2k initial channels.

    depth = 6n + 4 for layers with bottleneck, 3n + 4 without (bn_size=None).

    >>> sum(p.numel() for p in densenet_bc(100, 12).parameters())
    769162
    """
    per_layer = 3 if bn_size is None else 6
    if depth < per_layer + 4 or (depth - 4) % per_layer:
        raise ArgumentError(
            describe(
                expected=f"depth = {per_layer}n + 4 with n >= 1",
                got=repr(depth),
                where="densenet_bc",
                fix=f"nearest: {max(1, round((depth - 4) / per_layer)) * per_layer + 4}",
            )
        )
    return DenseNet(
        growth_rate,
        ((depth - 4) // per_layer,) * 3,
        compression,
        2 * growth_rate if num_init_features is None else num_init_features,
        bn_size,
        drop_rate,
        num_classes,
        small_inputs,
        in_channels,
        spatial_dims,
        recompute,
    )


def _imagenet(growth_rate: int, block_config: tuple[int, ...], num_init_features: int, name: str):
    def build(
        num_classes: int = 1000,
        *,
        compression: float = 0.5,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        small_inputs: bool = False,
        in_channels: int = 3,
        spatial_dims: int = 2,
        recompute: Level = "pointwise",
    ) -> DenseNet:
        return DenseNet(
            growth_rate,
            block_config,
            compression,
            num_init_features,
            bn_size,
            drop_rate,
            num_classes,
            small_inputs,
            in_channels,
            spatial_dims,
            recompute,
            init="fan_in",
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"{name}: growth rate {growth_rate}, blocks {block_config}, {num_init_features} initial channels; "
        "torchvision's initialisation."
    )
    return build


densenet121 = _imagenet(32, (6, 12, 24, 16), 64, "densenet121")
densenet161 = _imagenet(48, (6, 12, 36, 24), 96, "densenet161")
densenet169 = _imagenet(32, (6, 12, 32, 32), 64, "densenet169")
densenet201 = _imagenet(32, (6, 12, 48, 32), 64, "densenet201")
densenet264 = _imagenet(32, (6, 12, 64, 48), 64, "densenet264")
