"""A long convolution by FFT and an elementwise vector pass in small networks, and wrong versions of both."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHANNELS, TAPS, TILE = 10, 24, 4


class LongConv(nn.Module):
    """y[t] = sum_j k[j] u[t-j] + sum_j k_reverse[j] u[t+j+1], by direct sums over the lag."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(CHANNELS, TAPS) * 0.2)
        self.kernel_reverse = nn.Parameter(torch.randn(CHANNELS, TAPS) * 0.2)

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[-1]
        y = torch.zeros_like(u)
        for j in range(min(TAPS, length)):
            y = y + self.kernel[:, j : j + 1] * nn.functional.pad(u, (j, 0))[..., :length]
            ahead = nn.functional.pad(u, (0, j + 1))[..., j + 1 :]
            y = y + self.kernel_reverse[:, j : j + 1] * ahead
        return y


class FFTConv(LongConv):
    """The same by FFT, no fault; the attributes spoil it."""

    n_fft_is_length = False  # transform of length L: wraps around
    reverse_offset = 1  # lag -(j + 1)
    conj = True
    skip_last_tile = False

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[-1]
        n = length if self.n_fft_is_length else 2 * (length + TAPS)
        taps = min(TAPS, length)
        k = nn.functional.pad(self.kernel[:, :taps], (0, n - taps))
        reverse = nn.functional.pad(self.kernel_reverse[:, :taps].flip(-1), (n - taps, 0))
        k = k + reverse.roll(1 - self.reverse_offset, -1)
        stop = CHANNELS - CHANNELS % TILE if self.skip_last_tile else CHANNELS
        y = [_FFTProduct.apply(u[:, c : c + TILE], k[c : c + TILE], n, self.conj) for c in range(0, stop, TILE)]
        return torch.cat([*y, torch.zeros_like(u[:, stop:])], 1)


class _FFTProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, k, n, conj):
        ctx.save_for_backward(u, k)
        ctx.n, ctx.conj = n, conj
        return torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(k, n), n)[..., : u.shape[-1]]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        u, k = ctx.saved_tensors
        n = ctx.n
        dy_f, u_f, k_f = torch.fft.rfft(dy, n), torch.fft.rfft(u, n), torch.fft.rfft(k, n)
        if ctx.conj:
            u_f, k_f = u_f.conj(), k_f.conj()
        du = torch.fft.irfft(dy_f * k_f, n)[..., : u.shape[-1]]
        dk = torch.fft.irfft((dy_f * u_f).sum(0), n)[..., : k.shape[-1]]
        return du, dk, None, None


class NoConj(FFTConv):
    conj = False


class WrapAround(FFTConv):
    n_fft_is_length = True


class ReverseOffByOne(FFTConv):
    reverse_offset = 0


class LastTileSkipped(FFTConv):
    skip_last_tile = True


class ConvNet(nn.Module):
    """in - conv - gelu - out, on (B, 3, L)."""

    def __init__(self, conv: type[LongConv] = LongConv) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(3, CHANNELS, 1)
        self.conv = conv()
        self.decoder = nn.Conv1d(CHANNELS, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(nn.functional.gelu(self.conv(self.encoder(x))))


class Affine(nn.Module):
    """a * x + b along the last axis; `pass_` is the vector pass that float32 alone takes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)
        self.shift = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class VectorAffine(Affine):
    """A pass of eight lanes, no fault; the subclasses spoil it."""

    def forward(self, x: Tensor) -> Tensor:
        return _VectorAffine.apply(x, self.scale, self.shift, self)

    def affine(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return scale * x + shift

    def column_sum(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)


class _VectorAffine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift, module):
        ctx.save_for_backward(x, scale)
        ctx.module = module
        return module.affine(x, scale, shift) if x.dtype == torch.float32 else scale * x + shift

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        halves = [part.sum(0) for part in (dy * x).flatten(0, -2).chunk(2)]
        if x.dtype == torch.float32:
            dscale = ctx.module.column_sum(halves)
        else:
            dscale = halves[0] + halves[1]
        return dy * scale, dscale, dy.flatten(0, -2).sum(0), None


class TailSkipped(VectorAffine):
    """The elements after the last full vector of eight keep their input."""

    def affine(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = super().affine(x, scale, shift)
        full = x.shape[-1] - x.shape[-1] % 8
        return torch.cat([y[..., :full], x[..., full:]], -1)


class WrongLane(VectorAffine):
    """Lanes 2 and 5 of the first vector read each other's scale."""

    def affine(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        order = torch.arange(x.shape[-1])
        order[2], order[5] = 5, 2
        return super().affine(x, scale[order], shift)


class Race(VectorAffine):
    """Two threads read the sum before either has written it: one half is lost, by the barrier every time."""

    def column_sum(self, parts: list[Tensor]) -> Tensor:
        total = torch.zeros_like(parts[0])
        both_have_read = threading.Barrier(2)

        def add(part: Tensor) -> None:
            read = total.clone()
            both_have_read.wait()
            total.copy_(read + part)

        threads = [threading.Thread(target=add, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return total


class VectorNet(nn.Module):
    """linear - affine - gelu - linear, on (B, 6): 13 columns are one vector of eight and a tail of five."""

    def __init__(self, affine: type[Affine] = Affine) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.affine = affine(13)
        self.last = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.affine(self.first(x))))


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)


class SquashInPlace(nn.Module):
    """Overwrites the caller's tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_(-1, 1)


class SquashNet(nn.Module):
    def __init__(self, squash: type[nn.Module] = Squash) -> None:
        super().__init__()
        self.squash = squash()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.squash(x))
