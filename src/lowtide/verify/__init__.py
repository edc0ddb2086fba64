"""Is B the same network as A? Works on any two modules; nothing here depends on the rest of lowtide.

    report = lowtide.verify(reference, candidate, inputs)

| file | what |
| --- | --- |
| parity.py | the order of a verification |
| exact.py, low_precision.py, hooks.py, empty.py | its parts |
| run.py, subject.py, trees.py, draws.py, kinks.py | one step of one copy, and what is seen of it |
| rule.py, findings.py, report.py | when two tensors count as equal, causes and consequences, the table |
| localise.py, watch.py | the first module that departs |

This file imports no torch: `lowtide` imports it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from lowtide.verify.report import KINDS, Failure, Kind, Margin, ParityReport, Row

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS", "Failure", "Kind", "Margin", "ParityReport", "Row", "verify"]


def verify(
    reference: Callable[..., object],
    candidate: Callable[..., object],
    inputs: object,
    *,
    steps: int = 3,
    loss: Callable[..., torch.Tensor] | None = None,
    target: object = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | bool | None = None,
    forwards: int = 1,
    accumulate: int = 1,
    backward_twice: bool = False,
    frozen: Iterable[str] = (),
    key_map: Mapping[str, str] | Callable[[str], str] | None = None,
    without: Iterable[str] = (),
    seed: int = 0,
) -> ParityReport:
    """Is `candidate` the same network as `reference`: outputs, gradients, buffers, random numbers, eval output?

    Copies of both get the same weights, inputs and random numbers, train side by side in float64, and are compared
    after every step; then a step and an eval forward in float32 (or the dtype asked for) are compared to the float64
    run, with the reference's own rounding error as the measure. The caller's modules, gradients and generators are
    left alone.

        import torch, lowtide

        reference = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        candidate = MyLeanVersion()                    # the same state-dict keys
        report = lowtide.verify(reference, candidate, torch.randn(4, 3, 16, 16))
        print(report)                                  # a table; report.ok, report.failures, report.first_module
        report.raise_if_failed()                       # in a test

    Args:
        reference: what the answer is: a module, a bound method of one, or a function of tensors.
        candidate: what is to be the same; its state dict has the same keys, or `key_map` leads to them.
        inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments (any trees of tensors).
            Floating inputs get a gradient in steps 1, 3, ... and none in steps 2, 4, ..., as images have none.
        steps: free training steps in float64.
        loss: loss(output), or loss(output, target) with `target`. By default a fixed random projection of all outputs.
        optimizer: an optimiser whose class and settings to use, or a callable from parameters to one. By default SGD
            with momentum 0.9 and a rate that first moves the weights by 1 % of their norm.
        dtype: float64 alone, or the dtype to verify in besides float64; by default float32.
        device: by default where the reference's weights are.
        autocast: torch.bfloat16, torch.float16 or True (bfloat16): verify float32 modules under autocast.
        forwards: forwards (with different inputs) before each backward.
        accumulate: forward-backward pairs before each optimiser step.
        backward_twice: each backward runs twice over one graph (retain_graph).
        frozen: names of parameters or modules that get no gradient.
        key_map: reference key to candidate key: a function, or a dict of names and prefixes.
        without: parts to leave out: "no_grad_forward", "eval", "hooks".
        seed: of the random numbers, the projection included.

    Returns:
        A `ParityReport`: ok, failures, first_module, str(), to_json(), raise_if_failed().

    Raises:
        ArgumentError: an argument is out of range, the state dicts differ, a module cannot be copied, or the reference
            itself raises. What the candidate raises is a failure of kind "error", with its traceback.
    """
    from lowtide.verify.options import check_options
    from lowtide.verify.parity import Verification

    options = check_options(
        reference,
        inputs,
        steps=steps,
        loss=loss,
        target=target,
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        autocast=autocast,
        forwards=forwards,
        accumulate=accumulate,
        backward_twice=backward_twice,
        frozen=frozen,
        key_map=key_map,
        without=without,
        seed=seed,
    )
    return Verification(reference, candidate, options).run()
