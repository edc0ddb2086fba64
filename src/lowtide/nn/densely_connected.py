"""`DenselyConnected`: the chain x = cat([f_i(x), x]) of any network, in little memory.

# before: self.layers = nn.ModuleList(layers), and in forward
#     for layer in self.layers:
#         x = torch.cat([layer(x), x], 1)
self.layers = DenselyConnected(layers)            # same keys
x = self.layers(x)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.functional import densely_connected
from lowtide.levels import Level, check_level
from lowtide.nn.dense import warn_plain
from lowtide.nn.describe import is_hooked, must_trace


class DenselyConnected(nn.ModuleList):
    """x (N, c0, *S) -> (N, c0 + sum of k_i, *S), by x = cat([f_i(x), x], 1) for each layer f_i in turn.

    With `new_first=False` the new channels come last: x = cat([x, f_i(x)], 1).

    An f_i is any module from (N, c_i, *S) to (N, k_i, *S): dropout, batch norm, squeeze-and-excitation and autocast
    inside it are replayed. At a lean level it runs twice ("block": three times), and so do the hooks inside it; it must
    not change its input in place, and train no tensor but its own parameters. With a hook on an f_i itself the chain
    runs the plain way, with one warning.

    Saved: at "pointwise" and "layer" the features once, c0 + sum of k_i channels; at "block" the input alone.

    Raises:
        ArgumentError: unknown level; no layers; something that is no module; an f_i's output does not fit.
        UnsupportedError: at a lean level, double backward, or an f_i as excluded above.
    """

    recompute: Level

    def __init__(self, layers: Iterable[nn.Module], *, new_first: bool = True, recompute: Level = "pointwise") -> None:
        layers = list(layers)
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise ArgumentError(
                    describe(expected="layers that are modules", got=type(layer).__name__, where="DenselyConnected")
                )
        if not layers:
            raise ArgumentError(describe(expected="at least one layer", got="none", where="DenselyConnected"))
        super().__init__(layers)
        self.new_first = new_first
        self.recompute = check_level(recompute, "DenselyConnected")
        self._growths: list[int] = []

    def set_recompute(self, level: Level) -> None:
        """Change what is kept for backward; parameters, outputs and random numbers stay the same."""
        self.recompute = check_level(level, "DenselyConnected.set_recompute")

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        level: Level = "none" if must_trace() else self.recompute
        if level != "none" and (hooked := first_hooked(layers)) is not None:
            warn_plain(self, f"layer {hooked} has a hook or its own forward")
            level = "none"
        return densely_connected(x, layers, new_first=self.new_first, recompute=level, growths=self._growths)

    def extra_repr(self) -> str:
        return f"new_first={self.new_first}, recompute={self.recompute!r}"


def first_hooked(layers: Sequence[nn.Module]) -> int | None:
    """The first layer whose output somebody looks at: it would see a run without a graph."""
    return next((i for i, layer in enumerate(layers) if is_hooked(layer)), None)
