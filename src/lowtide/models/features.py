"""The feature extractor of a DenseNet, which joins a dense block and what follows it into one autograd node.

`DenseFeatures` is a `Sequential` in everything that can be seen from outside: children, keys, hooks, indexing. What
changes at a lean level is how its children are run:

    conv0 [norm0 relu0 pool0]     the stem: one node (conv0 alone needs none)
    denseblock, transition        one node: the block's features stay inside it
    denseblock, norm5 and head    one node that returns the pooled features, if nobody looks at `features` itself

A child with a hook is called by itself, so that the hook sees what it would see in ordinary autograd.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from lowtide import parts
from lowtide.functional import stem
from lowtide.levels import Level, check_level
from lowtide.nn.batch_norm import call_norm
from lowtide.nn.dense import AVG_POOL, MAX_POOL, DenseBlock, DenseLayer, Transition
from lowtide.nn.describe import (
    BATCH_NORMS,
    CONVOLUTIONS,
    NotLean,
    check_no_global_hooks,
    check_relu,
    check_unhooked,
    describe_convolution,
    describe_norm,
    is_hooked,
    must_trace,
)

STEM = ("conv0", "norm0", "relu0", "pool0")
ORDINARY = {*BATCH_NORMS, *CONVOLUTIONS, *MAX_POOL.values(), *AVG_POOL.values(), nn.ReLU}
FORWARDS = (DenseBlock.forward, DenseLayer.forward, Transition.forward)  # of subclasses too: sharding makes some


class DenseFeatures(nn.Sequential):
    """Stem, dense blocks, transitions and norm5: (N, c_in, *S) -> (N, c, *S'). `recompute` is the stem's level."""

    recompute: Level

    def __init__(self, modules: OrderedDict[str, nn.Module], *, recompute: Level = "pointwise") -> None:
        super().__init__(modules)
        self.recompute = check_level(recompute, "DenseFeatures")
        self.register_load_state_dict_pre_hook(_accept_other_spelling)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(input, pooled=False)

    def pooled(self, x: Tensor) -> Tensor:
        """Mean over positions of relu of the features: (N, c). Calls `self`, and so its hooks, if there are any."""
        if is_hooked(self) or type(self).forward is not DenseFeatures.forward:
            return F.relu(self(x)).flatten(2).mean(2)
        return self._run(x, pooled=True)

    def _run(self, x: Tensor, *, pooled: bool) -> Tensor:
        children = list(self.named_children())
        inside = True if pooled and self._may_reorder(x) else None
        x, position = self._run_stem(x, [name for name, _ in children], inside)
        while position < len(children):
            _, child = children[position]
            following = children[position + 1][1] if position + 1 < len(children) else None
            is_last = position + 2 == len(children)
            joined = self._run_joined(x, child, following, inside, head=pooled and is_last)
            if joined is not None:
                x, position = joined, position + 2
                if pooled and is_last:
                    return x
            else:
                x, position = call_norm(child, x), position + 1
        return F.relu(x).flatten(2).mean(2) if pooled else x

    def _may_reorder(self, x: Tensor) -> bool:
        """Between two nodes that nobody looks at the order of memory is free, and channels_last is the faster one.

        Somebody looks: a hook anywhere, a module of the user's own (`view` works in one order alone). And with dropout
        masks are drawn in the order of the maps.
        """
        return (
            x.device.type == "cpu" and x.dim() > 3 and all(_is_ordinary(m) for child in self for m in child.modules())
        )

    def _run_joined(
        self, x: Tensor, block: nn.Module, following: nn.Module | None, channels_last: bool | None, *, head: bool
    ) -> Tensor | None:
        """Block and following in one node, or None if they have to be called one by one."""
        if following is None or not isinstance(block, DenseBlock) or type(block).forward is not DenseBlock.forward:
            return None
        if is_hooked(block) or is_hooked(following) or block.recompute == "none" or must_trace():
            return None
        is_transition = type(following).forward is Transition.forward
        if not ((is_transition and getattr(following, "recompute", None) == block.recompute) or head):
            return None
        return block.run_with(x, following, channels_last=channels_last)

    def shard_units(self) -> list[list[nn.Module]]:
        """What `lowtide.distributed.shard` gathers together: each block with the transition in its node."""
        children = list(self.children())
        pairs = zip(children, [*children[1:], None], strict=True)
        return [
            [block, following] if isinstance(following, Transition) else [block]
            for block, following in pairs
            if isinstance(block, DenseBlock)
        ]

    def _run_stem(self, x: Tensor, names: list[str], channels_last: bool | None) -> tuple[Tensor, int]:
        """The stem's output and the number of children it used: 0 if they are to be called one by one."""
        if tuple(names[:4]) != STEM or self.recompute == "none" or must_trace():
            return x, 0
        conv, norm, relu, pool = (self.get_submodule(name) for name in STEM)
        try:
            check_no_global_hooks()
            check_relu(relu, "relu0")
            check_unhooked(pool, "pool0")
            assert isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            described = parts.Stem(
                describe_convolution(conv, "conv0", 7, stride=2, padding=3),
                describe_norm(norm, "norm0"),
                tuple(conv.stride),
                (3,) * len(conv.stride),
            )
        except NotLean:  # called one by one, which is exact, and little memory is at stake
            return x, 0
        if type(pool) not in MAX_POOL.values() or _settings(pool) != (3, 2, 1, 1, False, False):
            return x, 0
        return stem(x, described, recompute=self.recompute, channels_last=channels_last), 4


def _is_ordinary(module: nn.Module) -> bool:
    """Whether this is a part that DenseNets are built of, without dropout, and nobody sees what goes through it."""
    known = type(module) in ORDINARY or type(module).forward in FORWARDS
    return known and not is_hooked(module) and not getattr(module, "drop_rate", 0.0) > 0


def _settings(pool: nn.Module) -> tuple[object, ...]:
    names = ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode")
    return tuple(getattr(pool, name) for name in names)


def _accept_other_spelling(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The last norm may be called norm_final."""
    for key in [k for k in state_dict if k.startswith(f"{prefix}norm_final.")]:
        state_dict[f"{prefix}norm5.{key[len(prefix) + len('norm_final.') :]}"] = state_dict.pop(key)


def stem_modules(
    conv: type[nn.Module], norm: type[nn.Module], pool: type[nn.Module], in_channels: int, channels: int, small: bool
) -> OrderedDict[str, nn.Module]:
    """The children of the stem: conv0 (3x3) alone for small images, else conv0 (7x7, stride 2), norm0, relu0, pool0."""
    if small:
        return OrderedDict(conv0=conv(in_channels, channels, kernel_size=3, padding=1, bias=False))
    return OrderedDict(
        conv0=conv(in_channels, channels, kernel_size=7, stride=2, padding=3, bias=False),
        norm0=norm(channels),
        relu0=nn.ReLU(),
        pool0=pool(kernel_size=3, stride=2, padding=1),
    )
