"""Streams any taps: a direct head, and transforms of ever longer partitions behind it (partitioned overlap-save).

The first N = 64 taps are a dot product per sample. Taps n..2n-1, for n = N, 2N, .. n_max / 2, meet the inputs when a
block of n samples is complete, which is just in time for the n outputs that follow; taps from n_max on do so in
partitions of n_max. n_max is an eighth of the taps at most.

A sample costs N + O(log^2 K) multiply-adds on average. The dearest one, every n_max samples, pays for all partitions at
once: transforms of about 4 K numbers per channel. Nobody waits for it who streams in blocks of n_max samples or more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide.lean import stream_ring
from lowtide.stream_state import State

HEAD = 64


@dataclass(frozen=True)
class PartitionFilter:
    """Taps (C, H, K), and for each partition size n the spectra (P, C, H, n + 1) of its P partitions."""

    kernel: Tensor
    delay: int
    fingerprint: int
    spectra: dict[int, Tensor] = field(repr=False)

    @property
    def channels(self) -> int:
        return self.kernel.shape[0]

    @property
    def features(self) -> int:
        return self.kernel.shape[1]

    @property
    def taps(self) -> int:
        return self.kernel.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.kernel.dtype

    @property
    def device(self) -> torch.device:
        return self.kernel.device

    @property
    def longest(self) -> int:
        """n_max, or 0 where the head is all."""
        return max(self.spectra, default=0)

    @property
    def ring_rows(self) -> int:
        # whole partitions, as they lay at the last boundary
        n = self.longest
        return (-(-self.taps // n) + 1) * n if n else self.taps

    def state_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {
            "ring": (self.ring_rows, batch, self.features),
            "pending": (sum(self.spectra), batch, self.channels, self.features),
        }

    def block(self, u: Tensor, state: State) -> Tensor:
        """u (T, B, H), any T -> y (T, B, C, H), both in the filter's dtype."""
        return block(u, state, self)

    def refresh(self, state: State) -> None:
        refresh(state, self)


def partition_sizes(taps: int) -> list[int]:
    """N, 2N, .. n_max; none where the head holds all taps.

    >>> partition_sizes(64), partition_sizes(100), partition_sizes(4096)
    ([], [64], [64, 128, 256, 512])
    """
    if taps <= HEAD:
        return []
    sizes = [HEAD]
    while 16 * sizes[-1] <= taps:
        sizes.append(2 * sizes[-1])
    return sizes


def partition_filter(kernel: Tensor, delay: int, fingerprint: int) -> PartitionFilter:
    """The spectra of taps (C, H, K), float32 or float64: about 2.5 K numbers per channel beside the taps."""
    K = kernel.shape[-1]
    sizes = partition_sizes(K)
    spectra: dict[int, Tensor] = {}
    for n in sizes:
        last = n == sizes[-1]
        taps = kernel[..., n:] if last else kernel[..., n : 2 * n]
        count = -(-taps.shape[-1] // n)
        taps = torch.nn.functional.pad(taps, (0, count * n - taps.shape[-1]))
        spectra[n] = torch.fft.rfft(taps.unflatten(-1, (count, n)), n=2 * n).movedim(2, 0)
    return PartitionFilter(kernel, delay, fingerprint, spectra)


def block(u: Tensor, state: State, filter: PartitionFilter) -> Tensor:
    """u (T, B, H), any T -> y (T, B, C, H), both in the filter's dtype."""
    T, t = u.shape[0], int(state["position"])
    if filter.spectra and filter.taps <= 4 * T:
        y = u.new_empty(*u.shape[:2], filter.channels, filter.features)
        stream_ring.convolve(state["ring"], t, u, filter.taps, lambda features: filter.kernel[:, features], y)
        stream_ring.write(state["ring"], t, u)
        state["position"] += T
        refresh(state, filter)
        return y
    y = u.new_empty(*u.shape[:2], filter.channels, filter.features)
    done = 0
    while done < T:
        count = min(T - done, HEAD - (t + done) % HEAD)
        y[done : done + count] = _within_head(u[done : done + count], t + done, state, filter)
        done += count
        if (t + done) % HEAD == 0:
            for n in filter.spectra:
                if (t + done) % n == 0:
                    fire(n, t + done, state, filter)
    state["position"] += T
    return y


def _within_head(u: Tensor, t: int, state: State, filter: PartitionFilter) -> Tensor:
    """Samples between two boundaries of N: the head, and what the partitions have laid ready."""
    ring = state["ring"]
    T, N = u.shape[0], min(HEAD, filter.taps)
    if filter.spectra:
        stream_ring.write(ring, t, u)
        heard = stream_ring.read(ring, t - N + 1, t + T)
    else:  # a ring of so few taps does not hold old and new samples at once
        heard = torch.cat([stream_ring.read(ring, t - N + 1, t), u])
        stream_ring.write(ring, t, u)
    y = torch.einsum("tbhj,chj->tbch", heard.unfold(0, N, 1), filter.kernel[..., :N].flip(-1))
    first = 0
    for n in filter.spectra:
        y += state["pending"][first + t % n : first + t % n + T]
        first += n
    return y


def fire(n: int, t: int, state: State, filter: PartitionFilter) -> None:
    """The share of size n in outputs t..t+n-1, from the inputs before t; t is a multiple of n."""
    total: Tensor | None = None
    for p, spectrum in enumerate(filter.spectra[n], start=1):
        heard = stream_ring.read(state["ring"], t - (p + 1) * n, t - (p - 1) * n)
        part = torch.fft.rfft(heard.permute(1, 2, 0)).unsqueeze(1) * spectrum
        total = part if total is None else total.add_(part)
    assert total is not None
    first = sum(size for size in filter.spectra if size < n)
    state["pending"][first : first + n] = torch.fft.irfft(total, n=2 * n)[..., n:].permute(3, 0, 1, 2)


def refresh(state: State, filter: PartitionFilter) -> None:
    """Make what lies ready from the ring alone, as if the whole window had been streamed with these taps."""
    t = int(state["position"])
    state["weights"].fill_(filter.fingerprint)
    for n in filter.spectra:
        fire(n, t - t % n, state, filter)
