"""A fault that no comparison of numbers can see, a tensor hidden on ctx: the verifier passes it, the meter does not."""

from __future__ import annotations

import torch
from control_dense import DenseNet, RightByHand
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import lowtide

SHAPE = (4, 3, 6, 6)


class _HiddenConv1x1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x = x.clone()  # right: ctx.save_for_backward(x, weight)
        ctx.save_for_backward(weight)
        return F.conv2d(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        dx = torch.nn.grad.conv2d_input(ctx.x.shape, weight, dy)
        return dx, torch.nn.grad.conv2d_weight(ctx.x, weight.shape, dy)


class _ConvHidden(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return _HiddenConv1x1.apply(input, self.weight)


class KeptOnCtx(RightByHand):
    conv = _ConvHidden


def test_a_tensor_kept_on_ctx_is_rejected_by_the_meter() -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    plain, hidden = DenseNet(RightByHand, at=1), DenseNet(KeptOnCtx, at=1)
    lowtide.verify(plain, hidden, x).raise_if_failed()
    channels = hidden.layers[1].conv1.in_channels
    hidden_bytes = x.shape[0] * channels * x.shape[2] * x.shape[3] * x.element_size()
    assert lowtide.measure(plain, x, repeats=1).outside_autograd_bytes == 0
    assert lowtide.measure(hidden, x, repeats=1).outside_autograd_bytes == hidden_bytes
