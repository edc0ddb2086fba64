"""Any module as one node that keeps its input: the module runs again in backward.

    y = f(x);   in backward f runs again on x under the forward's random state, autocast and training flags

Saved: x; a random state if f draws numbers; the old values of buffers that f changed (running statistics of norms in
    training excepted: their output does not depend on them); the parameters.
Recomputed: f, once. Buffers and generators move once, in the forward.
Exactness: f's own operators on the same values.
Raises: UnsupportedError for double backward, for an f that changes its input in place or trains tensors that are not
    its parameters.
Source: Chen et al. 2016, arXiv 1604.06174.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.lean.replay import Autocast, check_closed, parameters_of, record, replay
from lowtide.lean.segment import refuse_double_backward

_WHERE = "a recomputed module"


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) for a module from one tensor to one tensor; see the module's text for what is saved."""
    parameters = list(parameters_of(module).values())
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
        return _Recomputed.apply(module, Autocast.now(x.device.type), x, *parameters)
    return module(x)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, autocast: Autocast, x: Tensor, *parameters: Tensor) -> Tensor:
        saved: list[Tensor] = []
        with autocast.again():
            out, recording = record(module, x, saved)
        ctx.module, ctx.autocast, ctx.recording, ctx.count = module, autocast, recording, len(parameters)
        ctx.save_for_backward(x, *parameters, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_WHERE)
        x, *rest = ctx.saved_tensors
        parameters, saved = rest[: ctx.count], rest[ctx.count :]
        needs_x, *needs = ctx.needs_input_grad[2:]
        again = x.detach().requires_grad_(needs_x)
        out, stand_ins = replay(ctx.module, again, ctx.recording, saved, ctx.autocast)
        check_closed(out, [again, *stand_ins.values()], _WHERE)
        # parameters_of lists a shared tensor under each of its names; its gradients add up
        places = [i for i, need in enumerate(needs) if need]
        wanted = [*([again] if needs_x else []), *(list(stand_ins.values())[i] for i in places)]
        found = list(torch.autograd.grad(out, wanted, grads[0].to(out.dtype), allow_unused=True))
        dx = found.pop(0) if needs_x else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for place, grad in zip(places, found, strict=True):
            sums[place] = grad
        return None, None, dx, *sums
