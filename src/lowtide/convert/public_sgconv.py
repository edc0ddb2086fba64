"""Modules of the public SGConv code: found by their tensors, run through `lowtide.functional.sgconv`.

The module keeps its name, parameters and buffers: only its forward is exchanged. What its tensors do not
say (how pieces are combined, stretched and laid out) is found by trying the forms on a copy.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.convert.dense import runs_plain, warn_plain
from lowtide.convert.probe import ProbeError, compare, probe_copy
from lowtide.convert.swap import Swapped, kind, state_of, swap
from lowtide.errors import LowtideError
from lowtide.functional import kernel_norm, sgconv
from lowtide.levels import Level
from lowtide.nn.describe import NotLean, check_no_global_hooks, check_unhooked
from lowtide.sgconv_form import Activation, KernelForm, LayerForm

SGCONV = "sgconv"
FLAG = "kernel_norm_initialized"
_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Identity: "identity",
}  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Identity)
_PROBE_LENGTH = 11


@dataclass(frozen=True)
class SGConvPlan:
    """`form` with the dropout rate of training; `output` and `norm`: paths of the output map and of a layer norm.

    `in_pair`: the module returns (y, None).
    """

    form: LayerForm
    output: str | None
    norm: str | None
    in_pair: bool


def looks_like_sgconv(module: nn.Module) -> bool:
    """Whether the tensors of `module` itself are those of a public SGConv layer."""
    pieces = getattr(module, "kernel_list", None)
    own = {**module._parameters, **module._buffers}
    return isinstance(pieces, nn.ParameterList) and {"D", "multiplier", "kernel_norm"} <= own.keys()


def find_sgconv(module: nn.Module, level: Level) -> SGConvPlan:
    """The plan of a module that looks like a public SGConv layer, its form found by trial runs.

    Raises:
        ProbeError, NotLean: it does something else.
    """
    # the public code prints when it makes its norm, and takes logarithms of integers in the default dtype
    with contextlib.redirect_stdout(io.StringIO()), _default_dtype(torch.float64):
        twin = First(probe_copy(module))
        candidates = list(_plans(module))
        for plan in candidates:
            x = _sample(plan.form, twin.inner)
            try:
                plan = replace(plan, in_pair=_returns_pair(twin.inner, x))
                if not _agrees(twin, plan, level, x):
                    continue
            except (ProbeError, LowtideError, RuntimeError):
                continue
            compare(twin, lambda copied, p=plan: swap(copied.inner, SGCONV, p, level), x)  # pyright: ignore[reportArgumentType]
            return plan
    raise ProbeError(f"none of {len(candidates)} forms of SGConv gives its output")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class First(nn.Module):
    """The first of a module's outputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


def _plans(module: Any) -> Iterator[SGConvPlan]:
    """Every form that the module's tensors and children allow, what its attributes say first."""
    pieces: list[Tensor] = list(module.kernel_list)
    shapes = {tuple(piece.shape) for piece in pieces}
    channels, features = module.D.shape if module.D.dim() == 2 else (0, 0)
    if len(shapes) != 1 or not channels:
        raise NotLean("its D is not (channels, features), or its kernel pieces are not of one shape")
    rows, width, kernel_dim = shapes.pop()
    if width != features or rows not in (channels, 2 * channels):
        expected = f"({channels} or {2 * channels}, {features}, kernel_dim)"
        raise NotLean(f"its kernel pieces are {(rows, width, kernel_dim)}, not {expected}")
    output, gated = _output_map(module)
    activation, rate = _pointwise(module, linear=output is None)
    norm = None if output is None else _layer_norm(module, channels * features)
    said = str(getattr(module, "mode", ""))
    settings = itertools.product(
        sorted(("cat", "sum"), key=lambda name: name not in said),
        sorted(("linear", "nearest"), key=lambda name: (name == "nearest") != ("nearest" in said)),
        sorted(range(5), key=lambda scale: scale != getattr(module, "init_scale", 0)),
        sorted((True, False), key=lambda flag: flag != getattr(module, "transposed", True)),
    )
    for combine, interpolation, init_scale, transposed in settings:
        decay = "power" if getattr(module, "decay", None) is not None else "scale"
        kernel: Any = KernelForm(kernel_dim, len(pieces), init_scale, combine, interpolation, decay=decay)  # pyright: ignore[reportArgumentType]
        form = LayerForm(
            kernel,
            channels,
            rows == 2 * channels,
            activation,
            "glu" if gated else None,
            rate,
            transposed,
            None if norm is None else module.get_submodule(norm).eps,
            output is None,
            transposed,
        )
        yield SGConvPlan(form, output, norm, in_pair=False)


def _output_map(module: nn.Module) -> tuple[str | None, bool]:
    """The path of the module that holds the output map's weight, and whether a gate follows it."""
    output: Any = module._modules.get("output_linear")
    if output is None:
        return None, False
    if isinstance(output, nn.Sequential):
        first, *others = output
        if [type(other) for other in others] != [nn.GLU]:
            raise NotLean("output_linear is more than a map and a GLU")
        path, output = "output_linear.0", first
    else:
        others, path = [], "output_linear"
    if set(output._parameters) - {"weight", "bias"} or output._modules or output._buffers:
        raise NotLean(f"{path} is no plain map")
    return path, bool(others)


def _pointwise(module: nn.Module, *, linear: bool) -> tuple[Activation, float]:
    """Activation, and dropout's rate in training."""
    if linear:
        return "identity", 0.0
    act, dropout = module._modules.get("activation"), module._modules.get("dropout")
    if type(act) not in _ACTIVATIONS or getattr(act, "approximate", "none") != "none":
        raise NotLean(f"activation is {act}, none of {', '.join(kind.__name__ for kind in _ACTIVATIONS)}")
    if dropout is not None and type(dropout) not in _DROPOUTS:
        raise NotLean(f"dropout is a {type(dropout).__name__}")
    assert act is not None
    return _ACTIVATIONS[type(act)], float(getattr(dropout, "p", 0.0))


def _layer_norm(module: nn.Module, features: int) -> str | None:
    """The path of the layer norm before the output map; None without a norm."""
    norm = module._modules.get("norm")
    found = [] if norm is None else [(name, m) for name, m in norm.named_modules() if m._parameters or m._buffers]
    if not found:
        return None
    name, layer = found[0]
    if len(found) > 1 or type(layer) is not nn.LayerNorm or layer.normalized_shape != (features,):
        raise NotLean(f"norm is a {type(layer).__name__}, not a layer norm of {features} features")
    return f"norm.{name}" if name else "norm"


def _sample(form: LayerForm, module: Any) -> Tensor:
    features = module.D.shape[1]
    length = _PROBE_LENGTH if features != _PROBE_LENGTH else _PROBE_LENGTH + 2
    shape = (2, features, length) if form.transposed else (2, length, features)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _returns_pair(module: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        out = module.eval()(x)
    if isinstance(out, Tensor):
        return False
    if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], Tensor) and out[1] is None):
        raise ProbeError("it returns something else than y or (y, None)")
    return True


def _agrees(twin: First, plan: SGConvPlan, level: Level, x: Tensor) -> bool:
    """Whether a form gives the output in eval; the rest is compared once one does."""
    with torch.no_grad():
        twin.eval()
        expected, found = twin(x), run(twin.inner, x, plan, level)
    return expected.shape == found.shape and bool((expected - found).norm() <= 1e-9 * expected.norm())


def run(module: Any, u: Tensor, plan: SGConvPlan, level: Level) -> Tensor:
    """The layer's output from the module's own tensors."""
    pieces, form = list(module.kernel_list), plan.form
    decay = getattr(module, "decay", None)
    shape = (pieces[0].shape[0], module.D.shape[1], 1)
    if module.kernel_norm.shape != shape or not bool(getattr(module, FLAG, True)):
        # as the public code, whose first forward makes the norm
        module.kernel_norm = kernel_norm(pieces, module.multiplier, decay, form.kernel)
        if hasattr(module, FLAG):
            setattr(module, FLAG, torch.ones_like(getattr(module, FLAG)))
    output: Any = None if plan.output is None else module.get_submodule(plan.output)
    bias = None if output is None else output._parameters.get("bias")
    norm: Any = None if plan.norm is None else module.get_submodule(plan.norm)
    return sgconv(
        u,
        pieces,
        module.multiplier,
        decay,
        module.kernel_norm,
        module.D,
        None if output is None else output.weight,
        None if bias is None else bias.flatten(),
        None if norm is None else norm.weight,
        None if norm is None else norm.bias,
        form=form if module.training else form.without_dropout(),
        recompute=level,
    )


@kind(SGCONV)
class LeanSGConv(Swapped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self, nn.Module)
        plan: SGConvPlan = state_of(self).plan[SGCONV]
        if runs_plain(self) or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            check_no_global_hooks()
            for name, child in self.named_modules():
                if name:
                    check_unhooked(child, name)
        except NotLean as reason:
            warn_plain(self, reason)
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        out = run(self, args[0], plan, state_of(self).level)
        return (out, None) if plan.in_pair else out
