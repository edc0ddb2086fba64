"""Whether a candidate is what it looks like: its own forward and the lean one, side by side in float64.

Both run on copies, with random weights (a zero-initialised convolution would hide what feeds it) and the same random
numbers, in training and in eval: output, gradients and buffers must agree.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from lowtide.convert.structure import CONVOLUTIONS

SIZES = {1: (9,), 2: (6, 5), 3: (4, 3, 5)}
TOLERANCE = 1e-9
_CHECKPOINTS = ("memory_efficient", "grad_checkpointing")


class ProbeError(Exception):
    """Why two forwards differ; never leaves this package."""


def spatial_dims(module: nn.Module) -> int | None:
    """The spatial axes that the convolutions of a module expect; None without any."""
    for child in module.modules():
        if isinstance(child, CONVOLUTIONS):
            return len(child.kernel_size)
    return None


def sample_map(module: nn.Module, channels: int, sizes: Sequence[int] | None = None) -> Tensor:
    """A small float64 map for a module, of two images."""
    dims = spatial_dims(module)
    if dims is None:
        raise ProbeError("no convolution inside")
    return torch.randn(2, channels, *(sizes or SIZES[dims]), dtype=torch.float64)


def probe_copy(module: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, with random weights, and without what hooks would do."""
    try:
        twin = copy.deepcopy(module)
        if any(p.is_meta for p in [*twin.parameters(), *twin.buffers()]):
            twin = twin.to_empty(device="cpu")
        twin = twin.to("cpu", torch.float64)
    except Exception as error:
        raise ProbeError(f"it cannot be copied: {_first_line(error)}") from None
    with torch.no_grad():
        for p in twin.parameters():
            p.normal_(0.0, 0.5).requires_grad_(True)
        for name, buffer in twin.named_buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("num_batches_tracked"):
                buffer.zero_()
    for child in twin.modules():
        for switch in _CHECKPOINTS:
            # a checkpoint that runs the norms again moves their running statistics twice; the values are the same
            if isinstance(getattr(child, switch, None), bool):
                setattr(child, switch, False)
        for hooks in (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks):
            hooks.clear()
    return twin


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Trial runs of copies must leave the module alone: a copy that still reaches into it (a function in an attribute,
    say) is found by the buffers that it moves, which get their values back.

    Raises:
        ProbeError: a copy moved a buffer.
    """
    before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        moved = [(buffer, value) for buffer, version, value in before if buffer._version != version]
        for buffer, value in moved:
            buffer.copy_(value)
        if moved:
            raise ProbeError("a copy of it changes the original's buffers")


_trusts_parts: ContextVar[bool] = ContextVar("trusts_parts", default=False)


@contextlib.contextmanager
def trusting_parts() -> Iterator[None]:
    """Inside, what was found by its parts is not run: for planning, which must allocate little."""
    token = _trusts_parts.set(True)
    try:
        yield
    finally:
        _trusts_parts.reset(token)


def compare(original: nn.Module, change: Callable[[nn.Module], None], x: Tensor, *, among_others: bool = True) -> None:
    """Check that `original`, a `probe_copy`, and a copy of it to which `change` was applied do the same with x.

    `among_others`: the answer decides between several candidates; otherwise `trusting_parts` leaves it out.

    Raises:
        ProbeError: they do not, or one of them cannot run.
    """
    if _trusts_parts.get() and not among_others:
        return
    changed = copy.deepcopy(original)
    change(changed)
    for training in (True, False):
        seen = []
        for module in (original, changed):
            module.train(training)
            try:
                seen.append(observe(module, x))
            except ProbeError:
                raise
            except Exception as error:
                raise ProbeError(f"a trial run failed: {_first_line(error)}") from None
        mode = "training" if training else "eval"
        for name, value in seen[0].items():
            _check_equal(name, mode, value, seen[1][name])


def observe(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Output, gradients and buffers of one step from a fixed seed."""
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1234)
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        if not isinstance(out, Tensor):
            raise ProbeError(f"it returns a {type(out).__name__}, not a tensor")
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
        (out * weights).sum().backward()
    seen: dict[str, Tensor | None] = {"the output": out.detach(), "the input's gradient": leaf.grad}
    seen.update({f"the gradient of {name}": p.grad for name, p in module.named_parameters()})
    seen.update({f"the buffer {name}": buffer.clone() for name, buffer in module.named_buffers()})
    return seen


def _check_equal(name: str, mode: str, expected: Tensor | None, found: Tensor | None) -> None:
    if expected is None and found is None:
        return
    if expected is None or found is None:
        raise ProbeError(f"in {mode} {name} is missing in one of a plain and a lean trial run")
    if expected.shape != found.shape:
        raise ProbeError(f"in {mode} {name} has shape {tuple(expected.shape)}, the lean block's {tuple(found.shape)}")
    error = (expected.double() - found.double()).norm().item()
    scale = expected.double().norm().item()
    if not error <= TOLERANCE * max(scale, 1e-3):
        raise ProbeError(f"in {mode} {name} differs from the lean block's by {error / max(scale, 1e-300):.1e}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
