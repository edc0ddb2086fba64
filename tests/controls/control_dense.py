"""A small dense network in ordinary autograd, and wrong versions of its layers, one fault each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

GROWTH = 4


class Layer(nn.Module):
    """norm - relu - conv1 - norm - relu - conv2 - dropout on the concatenation of all features so far."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 2 * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * GROWTH)
        self.conv2 = nn.Conv2d(2 * GROWTH, GROWTH, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def bottleneck(self, x: Tensor) -> Tensor:
        return self.conv1(F.relu(self.norm1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.conv2(F.relu(self.norm2(self.bottleneck(x)))))


class DenseNet(nn.Module):
    """Three layers; `faulty` takes the place of layer `at` (of all layers where `at` is None)."""

    def __init__(self, faulty: type[Layer] = Layer, at: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        kinds = [faulty if at in (None, i) else Layer for i in range(3)]
        self.layers = nn.ModuleList(kind(6 + GROWTH * i, dropout) for i, kind in enumerate(kinds))
        self.norm5 = nn.BatchNorm2d(6 + 3 * GROWTH)
        self.classifier = nn.Linear(6 + 3 * GROWTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv0(x)
        for layer in self.layers:
            features = torch.cat([features, layer(features)], 1)
        return self.classifier(F.relu(self.norm5(features)).mean((2, 3)))


class StatisticsTwice(Layer):
    """A checkpoint around the first half: its recompute updates the running statistics again."""

    def bottleneck(self, x: Tensor) -> Tensor:
        return checkpoint(super().bottleneck, x, use_reentrant=False)


class StatisticsNever(Layer):
    """Batch statistics without an update of the running ones."""

    def bottleneck(self, x: Tensor) -> Tensor:
        norm = self.norm1
        if not self.training:
            return super().bottleneck(x)
        return self.conv1(F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)))


class _UpdateInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, x, norm):
        ctx.save_for_backward(x)
        ctx.norm = norm
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.norm(x)
        return dy, None, None


class StatisticsInRecompute(StatisticsNever):
    """The running statistics move in the backward alone: a forward without one leaves them behind."""

    def bottleneck(self, x: Tensor) -> Tensor:
        y = super().bottleneck(x)
        return _UpdateInBackward.apply(y, x, self.norm1) if self.training and torch.is_grad_enabled() else y


class _Conv1x1(torch.autograd.Function):
    """A 1x1 convolution by hand; `scale` multiplies the weight's gradient, None drops it."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return F.conv2d(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = torch.nn.grad.conv2d_input(x.shape, weight, dy)
        if ctx.scale is None:
            return dx, None, None
        return dx, torch.nn.grad.conv2d_weight(x, weight.shape, dy) * ctx.scale, None


class _ConvByHand(nn.Conv2d):
    scale: float | None = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return _Conv1x1.apply(input, self.weight, self.scale)


class _ConvDropped(_ConvByHand):
    scale = None


class _ConvScaled(_ConvByHand):
    scale = 1.01


class RightByHand(Layer):
    """No fault: the hand-written convolution that the next two spoil."""

    conv: type[nn.Conv2d] = _ConvByHand

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__(channels, dropout)
        self.conv1 = self.conv(channels, 2 * GROWTH, 1, bias=False)


class WeightGradientDropped(RightByHand):
    conv = _ConvDropped


class WeightGradientScaled(RightByHand):
    conv = _ConvScaled


class _SharedConv1x1(torch.autograd.Function):
    """Writes its input to one workspace that all layers share, and reads it there in the backward."""

    workspace = torch.empty(0)

    @staticmethod
    def forward(ctx, x, weight):
        cls = _SharedConv1x1
        if cls.workspace.numel() < x.numel() or cls.workspace.dtype != x.dtype:
            cls.workspace = torch.empty(4 * x.numel(), dtype=x.dtype)
        z = cls.workspace[: x.numel()].view_as(x).copy_(x)
        ctx.save_for_backward(weight)
        ctx.shape = x.shape
        return F.conv2d(z, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        z = _SharedConv1x1.workspace[: ctx.shape.numel()].view(ctx.shape)
        return torch.nn.grad.conv2d_input(z.shape, weight, dy), torch.nn.grad.conv2d_weight(z, weight.shape, dy)


class _ConvShared(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return _SharedConv1x1.apply(input, self.weight)


class SharedWorkspace(RightByHand):
    """Right for one layer alone; in a network the next layer overwrites the workspace."""

    conv = _ConvShared


class _NormWithoutMeanTerm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        rstd = (var + eps).rsqrt()
        xhat = (x - mean) * rstd
        ctx.save_for_backward(xhat, weight, rstd)
        return xhat * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        xhat, weight, rstd = ctx.saved_tensors
        dgamma, dbeta = (dy * xhat).sum((0, 2, 3)), dy.sum((0, 2, 3))
        m = dy.numel() // dy.shape[1]
        # right: (dy - dbeta / m - xhat * dgamma / m)
        dx = weight.view(1, -1, 1, 1) * rstd * (dy - xhat * dgamma.view(1, -1, 1, 1) / m)
        return dx, dgamma, dbeta, None


class _NormFaulty(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        with torch.no_grad():
            super().forward(input)
        return _NormWithoutMeanTerm.apply(input, self.weight, self.bias, self.eps)


class NormWithoutMeanTerm(Layer):
    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__(channels, dropout)
        self.norm2 = _NormFaulty(2 * GROWTH)


class OtherRandomState(Layer):
    """A checkpoint that does not give the recompute the forward's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.bottleneck(x))))
        return checkpoint(self._drop, y, use_reentrant=False, preserve_rng_state=False)

    def _drop(self, y: Tensor) -> Tensor:
        return self.dropout(torch.sin(y)) if self.training else torch.sin(y)


class SineLayer(Layer):
    """The reference of `OtherRandomState`: the sine needs its input in the backward, so that there is a recompute."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.sin(self.conv2(F.relu(self.norm2(self.bottleneck(x))))))


class _Recomputed(torch.autograd.Function):
    """relu(norm(x)) and a convolution; the backward makes them again in `dtype`."""

    @staticmethod
    def forward(ctx, x, gamma, beta, weight, eps, dtype):
        ctx.save_for_backward(x, gamma, beta, weight)
        ctx.eps, ctx.dtype = eps, dtype
        return F.conv2d(F.relu(F.batch_norm(x, None, None, gamma, beta, training=True, eps=eps)), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        leaves = [t.detach().to(ctx.dtype or t.dtype).requires_grad_() for t in ctx.saved_tensors]
        x, gamma, beta, weight = leaves
        with torch.enable_grad():
            y = F.conv2d(F.relu(F.batch_norm(x, None, None, gamma, beta, training=True, eps=ctx.eps)), weight)
        grads = torch.autograd.grad(y, leaves, dy.to(y.dtype))
        return *(g.to(dy.dtype) for g in grads), None, None


class RightRecompute(Layer):
    """No fault: the statistics move once, in the forward."""

    dtype: torch.dtype | None = None

    def bottleneck(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().bottleneck(x)
        with torch.no_grad():
            self.norm1(x)
        norm = self.norm1
        return _Recomputed.apply(x, norm.weight, norm.bias, self.conv1.weight, norm.eps, self.dtype)


class RecomputeInHalf(RightRecompute):
    dtype = torch.bfloat16


class _BackwardInside(torch.autograd.Function):
    """The recompute starts from the input with its graph, and calls backward: it runs on into the layers upstream."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        ctx.function = function
        with torch.no_grad():
            return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.function(x)
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            y.backward(dy, retain_graph=True)
        return dx, None


class BackwardInsideRecompute(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.training:
            return super().forward(x)
        with torch.no_grad():  # the one update of the statistics
            self.norm2(self.bottleneck(x))
        return _BackwardInside.apply(x, self._without_statistics)

    def _without_statistics(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(_batch_norm(x, self.norm1)))
        return self.conv2(F.relu(_batch_norm(h, self.norm2)))


def _batch_norm(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


class EvalWithBatchStatistics(Layer):
    """Normalises by the batch in eval mode too."""

    def bottleneck(self, x: Tensor) -> Tensor:
        if self.training:
            return super().bottleneck(x)
        return self.conv1(F.relu(_batch_norm(x, self.norm1)))


class DrawsOneMore(Layer):
    """Draws a random number that nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().forward(x)


class Raises(Layer):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("workspace too small")


class InPlaceNet(DenseNet):
    """The last ReLU overwrites what hooks on norm5 have been given."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.conv0(x)
        for layer in self.layers:
            features = torch.cat([features, layer(features)], 1)
        return self.classifier(F.relu_(self.norm5(features)).mean((2, 3)))


class DetachedNet(DenseNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class ReentrantStem(DenseNet):
    """A reentrant checkpoint around the stem: no gradient for its weight where the image needs none."""

    def forward(self, x: Tensor) -> Tensor:
        features = checkpoint(self.conv0, x, use_reentrant=True)
        for layer in self.layers:
            features = torch.cat([features, layer(features)], 1)
        return self.classifier(F.relu(self.norm5(features)).mean((2, 3)))
