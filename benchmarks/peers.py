"""Other ways to compute the same long convolution, forward and backward: y[t] = sum_j k[j] u[t-j], per feature.

Each is used as its documentation says for a causal convolution of every feature with its own kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from harness import Contender, device
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowtide.functional import long_conv

Convolve = Callable[[Tensor, Tensor], Tensor]  # u (B, H, L), k (H, K) -> (B, H, L)


def plain(u: Tensor, k: Tensor) -> Tensor:
    return long_conv(u, k, recompute="none")


def checkpointed(u: Tensor, k: Tensor) -> Tensor:
    """The transforms run again in backward; nothing but u and k is kept."""
    y = checkpoint(plain, u, k, use_reentrant=False)
    assert isinstance(y, Tensor)
    return y


def fft_conv_pytorch(u: Tensor, k: Tensor) -> Tensor:
    from fft_conv_pytorch import fft_conv

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)  # its own, harmless so far
        # a correlation, as torch's own convolutions: the kernel is turned round, the past is padded
        return fft_conv(F.pad(u, (k.shape[1] - 1, 0)), k.flip(1).unsqueeze(1), groups=k.shape[0])


def julius(u: Tensor, k: Tensor) -> Tensor:
    """It has no groups: one call per feature."""
    from julius.fftconv import fft_conv1d

    past, weight = F.pad(u, (k.shape[1] - 1, 0)), k.flip(1)
    columns = [fft_conv1d(past[:, h : h + 1], weight[h : h + 1].unsqueeze(1)) for h in range(k.shape[0])]
    return torch.cat(columns, 1)


def nvsubquadratic(u: Tensor, k: Tensor) -> Tensor:
    from nvsubquadratic.ops.fftconv import causal_fftconv1d_fp32_bhl

    return causal_fftconv1d_fp32_bhl(u, k.unsqueeze(0))


def nvsubquadratic_chunked(u: Tensor, k: Tensor) -> Tensor:
    """A quarter of the features at a time."""
    from nvsubquadratic.ops.fftconv_chunked import causal_fftconv1d_fp32_bhl_chunked

    return causal_fftconv1d_fp32_bhl_chunked(u, k.unsqueeze(0), chunk_size=max(1, k.shape[0] // 4))


CONVOLUTIONS: dict[str, Convolve] = {
    function.__name__: function
    for function in (plain, checkpointed, fft_conv_pytorch, julius, nvsubquadratic, nvsubquadratic_chunked)
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def convolution(shape: tuple[int, int, int], peer: str, compiled: bool = False) -> Callable[[], None]:
    """A step with the inputs of `sgconv.convolution`."""
    B, H, L = shape
    function = torch.compile(CONVOLUTIONS[peer]) if compiled else CONVOLUTIONS[peer]
    u, dy = noise(B, H, L).requires_grad_(), noise(B, H, L, seed=1)
    k = (noise(H, L, seed=2) / L**0.5).requires_grad_()

    def step() -> None:
        u.grad = k.grad = None
        function(u, k).backward(dy)

    return step


def contenders(shape: tuple[int, int, int]) -> list[Contender]:
    def peer(name: str, function: str, needs: str = "", skip: str = "") -> Contender:
        return Contender(name, "peers:convolution", {"shape": shape, "peer": function}, needs=needs, skip=skip)

    large = shape[0] * shape[1] * shape[2] > 2**23
    return [
        peer("checkpoint(plain)", "checkpointed"),
        peer("fft-conv-pytorch", "fft_conv_pytorch", "fft_conv_pytorch"),
        peer(
            "julius, feature by feature",
            "julius",
            "julius",
            "not run at this size: 15 times plain's time at (1, 8, 65536)" if large else "",
        ),
        peer("nvsubquadratic", "nvsubquadratic", "nvsubquadratic"),
        peer("nvsubquadratic, chunked", "nvsubquadratic_chunked", "nvsubquadratic"),
    ]
