"""Long convolution in frames: one loop for the whole-sequence transform and for overlap-save.

A frame is N input samples from position t0 - lead on, zero outside the sequence. With lag j of the kernel at index
j mod N, the circular convolution of a frame is right at its indices lead .. lead + hop - 1: outputs t0 .. t0 + hop - 1.

- whole: lead = 0, hop = L, one frame of N >= L + max(K - 1, R) samples;
- overlap-save, for kernels much shorter than the sequence: lead = K - 1, N = hop + K - 1 + R.

    B batch, C kernels per feature, H features, L length, K forward taps, R reverse taps, n frames, F = N // 2 + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.kernels import alike
from lowtide.lean.fft_sizes import fast_length, rows_per_tile

# taps of some features in the computing dtype: forward (C, h, K) and reverse (C, h, R) or None
Taps = tuple[Tensor, Tensor | None]
TapsOf = Callable[[slice], Taps]
TapsSink = Callable[[slice, Tensor, Tensor | None], None]

# measured (docs/log.md): below 2^15 one transform is in the cache anyway; above it overlap-save wins as long as its
# frames hold at most 1.6 times the samples of the one transform, since short transforms are that much faster per sample
SAVE_LENGTH = 2**15
SAVE_SAMPLES = 1.6
SAVE_LEAST_FRAME = 512


def best_frame(L: int, overlap: int) -> tuple[int, int]:
    """(N, hop) of the overlap-save frames that transform the fewest samples; N is 2 to 8 times the overlap."""
    sizes = {fast_length(max(SAVE_LEAST_FRAME, times * (overlap + 1))) for times in (2, 3, 4, 6, 8)}
    N = min(sorted(sizes), key=lambda N: -(-L // (N - overlap)) * N)
    return N, N - overlap


@dataclass(frozen=True)
class Frames:
    """Sizes of one convolution, and how many features, rows of the batch and frames share a tile."""

    B: int
    C: int
    H: int
    L: int
    K: int
    R: int
    N: int
    lead: int
    hop: int
    batch_tile: int
    feature_tile: int
    frame_tile: int

    @classmethod
    def plan(cls, u_BHL: Tensor, C: int, K: int, R: int, dtype: torch.dtype, tile_bytes: int | None = None) -> Frames:
        """Choose the method, the transform's size and the tile; `tile_bytes` bounds one buffer of real rows."""
        B, H, L = u_BHL.shape
        K, R = min(K, L), min(R, L - 1)
        N, lead, hop = fast_length(L + max(K - 1, R)), 0, L
        if L >= SAVE_LENGTH:
            frame, step = best_frame(L, K - 1 + R)
            if -(-L // step) * frame <= SAVE_SAMPLES * N and step < L:
                N, lead, hop = frame, K - 1, step
        rows, least_rows = rows_per_tile(B * H * L, N, dtype.itemsize, u_BHL.device, tile_bytes)
        batch_tile = max(1, min(B, rows))
        frame_tile = max(1, min(-(-L // hop), rows // batch_tile))
        shared = batch_tile * frame_tile
        feature_tile = max(1, min(H, max(rows // shared, -(-least_rows // shared))))
        return cls(B, C, H, L, K, R, N, lead, hop, batch_tile, feature_tile, frame_tile)

    def feature_tiles(self) -> list[slice]:
        return _slices(self.H, self.feature_tile)

    def batch_tiles(self) -> list[slice]:
        return _slices(self.B, self.batch_tile)

    def time_tiles(self) -> list[tuple[int, int, int]]:
        """(first output, end of outputs, frames) of each tile."""
        span = self.hop * self.frame_tile
        return [(t, min(t + span, self.L), -(-(min(t + span, self.L) - t) // self.hop)) for t in range(0, self.L, span)]


def _slices(total: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


class Scratch:
    """Buffers that the tiles of one call share: fresh pages for every tile would cost more than the arithmetic."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    def real(self, name: str, *shape: int) -> Tensor:
        return self._take(name, self._dtype, shape)

    def spectrum(self, name: str, *shape: int) -> Tensor:
        return self._take(name, self._dtype.to_complex(), shape)

    def _take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        held = self._buffers.get(name)
        if held is None or held.numel() < count:
            held = self._buffers[name] = torch.empty(count, dtype=dtype, device=self._device)
        return held[:count].view(shape)


def _read_strip(source: Tensor, start: int, valid: Tensor | None, out: Tensor) -> None:
    """out = source[..., start : start + width], zero outside the sequence and where `valid` is False."""
    L, width = source.shape[-1], out.shape[-1]
    a, b = max(start, 0), min(start + width, L)
    out[..., : a - start].zero_()
    out[..., b - start :].zero_()
    inside = out[..., a - start : b - start]
    inside.copy_(source[..., a:b])
    if valid is not None:
        inside.masked_fill_(~valid[:, None, a:b], 0)


def _kernel_spectrum(taps: Taps, skip_CH: Tensor | None, plan: Frames, scratch: Scratch) -> Tensor:
    """(C, h, 1, F): lag j at index j mod N; the skip is a part of lag 0."""
    k, k_reverse = taps
    C, h = k.shape[:2]
    lags = scratch.real("frame", C, h, plan.N)
    lags[..., : plan.K].copy_(k[..., : plan.K])
    lags[..., plan.K : plan.N - plan.R].zero_()
    if plan.R:
        assert k_reverse is not None
        lags[..., plan.N - plan.R :].copy_(k_reverse[..., : plan.R].flip(-1))
    if skip_CH is not None:
        lags[..., 0] += skip_CH
    spectrum = scratch.spectrum("kernel", C, h, plan.N // 2 + 1)
    torch.fft.rfft(lags, out=spectrum)
    return spectrum.unsqueeze(2)


def _input_spectrum(
    u_bhL: Tensor, t0: int, frames: int, valid: Tensor | None, plan: Frames, scratch: Scratch
) -> Tensor:
    """(b, h, n, F) of the frames whose first output is t0, t0 + hop, ..."""
    b, h = u_bhL.shape[:2]
    strip = scratch.real("frame" if frames == 1 else "strip", b, h, (frames - 1) * plan.hop + plan.N)
    _read_strip(u_bhL, t0 - plan.lead, valid, strip)
    return torch.fft.rfft(
        strip.unfold(-1, plan.N, plan.hop), out=scratch.spectrum("input", b, h, frames, plan.N // 2 + 1)
    )


def _accumulate(total: Tensor | None, part: Tensor, scratch: Scratch) -> Tensor:
    if total is None:
        return scratch.spectrum("input gradient", *part.shape).copy_(part)
    return total.add_(part)


def convolve(
    u_BHL: Tensor,
    taps_of: TapsOf,
    skip_CH: Tensor | None,
    out_BCHL: Tensor,
    plan: Frames,
    dtype: torch.dtype,
    valid_BL: Tensor | None = None,
) -> None:
    """out[b, c, h, t] = sum_j k[c, h, j] u[b, h, t - j] + sum_j k_reverse[c, h, j] u[b, h, t + j + 1] + skip u."""
    scratch = Scratch(u_BHL.device, dtype)
    N, F = plan.N, plan.N // 2 + 1
    for hs in alike(plan.feature_tiles()):
        h = hs.stop - hs.start
        K_CHnF = _kernel_spectrum(taps_of(hs), None if skip_CH is None else skip_CH[:, hs], plan, scratch)
        for bs in alike(plan.batch_tiles()):
            b = bs.stop - bs.start
            valid = None if valid_BL is None else valid_BL[bs]
            for t0, t1, n in alike(plan.time_tiles()):
                U = _input_spectrum(u_BHL[bs, hs], t0, n, valid, plan, scratch)
                for c in range(plan.C):
                    Y = torch.mul(U, K_CHnF[c], out=U if plan.C == 1 else scratch.spectrum("product", b, h, n, F))
                    y = torch.fft.irfft(Y, n=N, out=scratch.real("frame", b, h, n, N))
                    y = y[..., plan.lead : plan.lead + plan.hop].flatten(-2)
                    out_BCHL[bs, c, hs, t0:t1].copy_(y[..., : t1 - t0])


def convolve_backward(
    u_BHL: Tensor,
    taps_of: TapsOf,
    skip_CH: Tensor | None,
    dy_BCHL: Tensor,
    du_BHL: Tensor | None,
    sink: TapsSink | None,
    plan: Frames,
    dtype: torch.dtype,
    valid_BL: Tensor | None = None,
) -> None:
    """Write du[s] = sum_lag k[lag] dy[s + lag] and hand dk[lag] = sum_b,t dy[t] u[t - lag] to `sink`, tile by tile.

    One transform of dy serves both. `du_BHL` may be the memory of `dy_BCHL` (C = 1): all is read before it is written.
    """
    scratch = Scratch(u_BHL.device, dtype)
    N, F = plan.N, plan.N // 2 + 1
    for hs in alike(plan.feature_tiles()):
        h = hs.stop - hs.start
        K_CHnF = None
        if du_BHL is not None:
            K_CHnF = _kernel_spectrum(taps_of(hs), None if skip_CH is None else skip_CH[:, hs], plan, scratch)
            K_CHnF.conj_physical_()
        dK_CHF = scratch.spectrum("kernel gradient", plan.C, h, F).zero_() if sink is not None else None
        for bs in alike(plan.batch_tiles()):
            b = bs.stop - bs.start
            valid = None if valid_BL is None else valid_BL[bs]
            fold = None if du_BHL is None else _OverlapAdd(du_BHL[bs, hs], valid, plan, scratch)
            for t0, t1, n in alike(plan.time_tiles()):
                U = dU = None
                if dK_CHF is not None:
                    U = _input_spectrum(u_BHL[bs, hs], t0, n, valid, plan, scratch).conj_physical_()
                for c in range(plan.C):
                    dY = _output_gradient_spectrum(dy_BCHL[bs, c, hs], t0, n, plan, scratch)
                    if dK_CHF is not None and U is not None:
                        product = U if plan.C == 1 else scratch.spectrum("product", b, h, n, F)
                        dK_CHF[c] += torch.mul(dY, U, out=product).sum((0, 2))
                    if K_CHnF is not None:
                        dY.mul_(K_CHnF[c])
                        dU = dY if plan.C == 1 else _accumulate(dU, dY, scratch)
                if fold is not None and dU is not None:
                    fold.add(torch.fft.irfft(dU, n=N, out=scratch.real("frame", b, h, n, N)), t0, t1)
        if sink is not None and dK_CHF is not None:
            dk = torch.fft.irfft(dK_CHF, n=N, out=scratch.real("frame", plan.C, h, N))
            sink(hs, dk[..., : plan.K], dk[..., N - plan.R :].flip(-1) if plan.R else None)


def _output_gradient_spectrum(dy_bhL: Tensor, t0: int, frames: int, plan: Frames, scratch: Scratch) -> Tensor:
    """(b, h, n, F): each frame holds its own hop of dy at lead .. lead + hop, zero elsewhere."""
    b, h = dy_bhL.shape[:2]
    frame = scratch.real("frame", b, h, frames, plan.N)
    if frames == 1:
        _read_strip(dy_bhL[..., t0 : t0 + plan.hop], -plan.lead, None, frame.squeeze(2))
    else:
        frame[..., : plan.lead].zero_()
        frame[..., plan.lead + plan.hop :].zero_()
        blocks = scratch.real("blocks", b, h, frames * plan.hop)
        _read_strip(dy_bhL[..., t0:], 0, None, blocks)
        frame[..., plan.lead : plan.lead + plan.hop].copy_(blocks.unflatten(-1, (frames, plan.hop)))
    return torch.fft.rfft(frame, out=scratch.spectrum("output gradient", b, h, frames, plan.N // 2 + 1))


class _OverlapAdd:
    """Adds frames of du where they overlap and writes what no later frame reaches; the rest is carried over."""

    def __init__(self, du_bhL: Tensor, valid: Tensor | None, plan: Frames, scratch: Scratch) -> None:
        self._du, self._valid, self._plan, self._scratch = du_bhL, valid, plan, scratch
        self._carry: Tensor | None = None

    def add(self, frames: Tensor, t0: int, t1: int) -> None:
        plan = self._plan
        if plan.lead == 0 and plan.hop == plan.L:
            self._write(frames[:, :, 0, : plan.L], 0)
            return
        b, h, n, N = frames.shape
        overlap = N - plan.hop
        strip = self._scratch.real("folded", b, h, (n + 1) * plan.hop).zero_()
        cells = strip.unflatten(-1, (n + 1, plan.hop))
        cells[..., :n, :] += frames[..., : plan.hop]
        cells[..., 1:, :overlap] += frames[..., plan.hop :]
        if self._carry is not None:
            strip[..., :overlap] += self._carry
        last = t1 == plan.L
        done = strip.shape[-1] if last else n * plan.hop
        self._write(strip[..., :done], t0 - plan.lead)
        if not last:
            self._carry = strip[..., n * plan.hop : n * plan.hop + overlap].clone()

    def _write(self, values: Tensor, start: int) -> None:
        L = self._plan.L
        a, b = max(start, 0), min(start + values.shape[-1], L)
        self._du[..., a:b].copy_(values[..., a - start : b - start])
        if self._valid is not None:
            self._du[..., a:b].masked_fill_(~self._valid[:, None, a:b], 0)
