"""SGConv sample by sample: the state, the steps, and the coefficients that are made once per weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.functional import State, StreamFilter, sgconv_block, stream_filter, stream_state
from lowtide.sgconv_form import LayerForm, check_int

# samples at a time when the end of a two-sided stream is worked off
FINISH_BLOCK = 4096


@cache
def _optimizer_steps() -> list[int]:
    """The number of steps that torch's optimisers took since the first call: fused ones raise no tensor's version."""
    steps = [0]

    def count(*_: object) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps


class StreamingSGConv:
    """The streaming methods of `lowtide.nn.SGConv`; no parameters, no buffers, nothing in the state dict.

    A stream gives what `forward` gives in eval mode on the whole input, whatever the sizes of the blocks: the window is
    all kernel_dim * 2^(n_scales - 1 + init_scale) taps for both, so inputs further back do not count for either. The
    state is a dict of tensors that is changed in place: ring of inputs (slots, B, H), intermediate results
    (slots, B, ..), and two counters common to all rows.

    Every step costs the same, about 2 * kernel_dim * n_scales multiply-adds per feature and output, whatever the number
    of taps. With the power decays a step costs 64 multiply-adds and its share of transforms, which come at the end of
    each partition: the dearest step transforms four times the taps.

    Coefficients are made when they are first needed and again when a parameter was changed, moved or replaced. A write
    through `.data`, which torch does not count, goes unnoticed: call `forget_stream()` behind it.
    """

    form: LayerForm
    kernel_list: nn.ParameterList
    multiplier: Tensor
    decay: Tensor | None
    kernel_norm: Tensor
    D: nn.Parameter
    output_linear: nn.Linear | None
    norm: nn.LayerNorm | None
    training: bool

    @property
    def lookahead(self) -> int:
        """How many inputs an output waits for: 0, or all the taps of the reverse kernel if two-sided."""
        return self.form.kernel.taps if self.form.bidirectional else 0

    def initial_state(self, batch_size: int) -> State:
        """The state of a stream that has heard nothing: at most 1.05 numbers per tap and feature (power decays: 1.5,
        and 192 more per feature).

        Two-sided: twice as many taps, so twice as large.
        """
        check_int(batch_size, 1, "batch_size", "SGConv.initial_state")
        return stream_state(self._stream_filter(), batch_size)

    def step(self, u_t: Tensor, state: State) -> tuple[Tensor, State]:
        """The next sample: (B, H) -> (B, H), or (B, channels * H) if `linear`; with the state, changed in place.

        Raises:
            UnsupportedError: two-sided, or dropout in training mode.
            ArgumentError: another shape, or a state of another batch size, layer, dtype or device.
        """
        self._refuse_two_sided("step")
        H = self._features
        if u_t.dim() != 2 or u_t.shape[1] != H:
            raise ArgumentError(describe(expected=f"u_t (B, {H})", got=str(tuple(u_t.shape)), where="SGConv.step"))
        return self._block(u_t.unsqueeze(0), state).squeeze(0), state

    def prefill(self, u: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """The next T >= 0 samples, from any state: u as for `forward` -> T outputs, and the state, changed in place.

        Args:
            u: (B, H, T), or (B, T, H) if not `transposed`.
            state: of this layer, at any point of a stream.
            lengths: (B,) integers 0..T: how many samples of each row count. The others come first (padding on the
                left): such rows start later, their outputs are 0 there.

        Raises:
            UnsupportedError: two-sided, or dropout in training mode.
            ArgumentError: another shape, or a state of another batch size, layer, dtype or device.
        """
        self._refuse_two_sided("prefill")
        rows = self._time_first(u, "prefill")
        if lengths is None:
            return self._time_back(self._block(rows, state)), state
        T, B, _ = rows.shape
        if lengths.shape != (B,) or lengths.is_floating_point() or lengths.is_complex():
            got = f"{tuple(lengths.shape)} {lengths.dtype}"
            raise ArgumentError(describe(expected=f"integers ({B},)", got=got, where="SGConv.prefill(lengths=)"))
        padding = (torch.arange(T, device=u.device)[:, None] < T - lengths.to(u.device)).unsqueeze(-1)
        y = self._block(rows.masked_fill(padding, 0), state).masked_fill(padding, 0)
        return self._time_back(y), state

    def chunk(self, u: Tensor, state: State) -> tuple[Tensor, State]:
        """The next T >= 0 samples; returns the outputs that are complete by now, and the state, changed in place.

        A two-sided layer hears `lookahead` samples ahead: the outputs lag behind the inputs by as many, so the first
        calls return fewer than T. `finish` returns the rest. A causal layer lags by none.
        """
        rows = self._time_first(u, "chunk")
        early = max(0, self.lookahead - int(state["position"]))  # outputs of times before the stream began
        return self._time_back(self._block(rows, state)[early:]), state

    def finish(self, state: State) -> tuple[Tensor, State]:
        """The outputs still due when the input has ended; afterwards the state is an initial one."""
        heard, due = int(state["position"]), self.lookahead
        _, B, H = state["ring"].shape
        # zeros follow the input; the empty block is the whole answer of a causal layer
        sizes = [min(FINISH_BLOCK, due - start) for start in range(0, due, FINISH_BLOCK)]
        outputs = [self._block(self.D.new_zeros(size, B, H), state) for size in (*sizes, 0)]
        for name, leaf in stream_state(self._stream_filter(), B).items():
            state[name].copy_(leaf)
        return self._time_back(torch.cat(outputs)[max(0, due - heard) :]), state

    def forget_stream(self) -> None:
        """Make the coefficients anew at the next step: needed behind a write through `.data` only."""
        self.__dict__.pop("_stream_cache", None)

    @property
    def _features(self) -> int:
        return self.D.shape[1]

    def _block(self, rows: Tensor, state: State) -> Tensor:
        """(T, B, H) -> (T, B, O)."""
        if self.training and self.form.drop_rate > 0 and not self.form.linear:
            expected, fix = "a layer in eval mode (steps have no dropout)", "call layer.eval()"
            raise UnsupportedError(describe(expected=expected, got="training mode", where="SGConv", fix=fix))
        output, norm = self.output_linear, self.norm
        return sgconv_block(
            rows,
            state,
            self._stream_filter(),
            None if output is None else output.weight,
            None if output is None else output.bias,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            form=self._stream_form,
        )

    @cached_property
    def _stream_form(self) -> LayerForm:
        return replace(self.form, transposed=False, drop_rate=0.0)

    def _stream_filter(self) -> StreamFilter:
        # ParameterList gives its items slowly, and this runs for every sample
        pieces = [x for x in self.kernel_list._parameters.values() if x is not None]
        decay = self.decay
        tensors = [*pieces, self.multiplier, self.kernel_norm, self.D]
        if decay is not None:
            tensors.append(decay)
        versions = [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
        key = (_optimizer_steps()[0], versions)
        cache = self.__dict__.get("_stream_cache")
        if cache is not None and cache[0] == key:
            return cache[1]
        form = self.form
        filter = stream_filter(
            [x.detach() for x in pieces],
            self.multiplier,
            None if decay is None else decay.detach(),
            self.kernel_norm,
            self.D.detach(),
            form=form.kernel,
            bidirectional=form.bidirectional,
        )
        # the tensors stay alive beside the key: no other can come to lie at their addresses
        self.__dict__["_stream_cache"] = (key, filter, [x.detach() for x in tensors])
        return filter

    def __getstate__(self) -> dict[str, Any]:
        """Without the coefficients, which a copy makes for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_stream_cache"}

    def _time_first(self, u: Tensor, method: str) -> Tensor:
        H, transposed = self._features, self.form.transposed
        if u.dim() != 3 or u.shape[1 if transposed else 2] != H:
            expected = f"u (B, {H}, T)" if transposed else f"u (B, T, {H})"
            raise ArgumentError(describe(expected=expected, got=str(tuple(u.shape)), where=f"SGConv.{method}"))
        return u.permute(2, 0, 1) if transposed else u.transpose(0, 1)

    def _time_back(self, y: Tensor) -> Tensor:
        return y.permute(1, 2, 0) if self.form.transposed else y.transpose(0, 1)

    def _refuse_two_sided(self, method: str) -> None:
        if self.form.bidirectional:
            raise UnsupportedError(
                describe(
                    expected="a causal layer",
                    got=f"bidirectional=True: an output needs the {self.lookahead} inputs that follow it",
                    where=f"SGConv.{method}",
                    fix="call chunk(u, state), whose outputs lag behind by as many, and finish(state) at the end",
                )
            )
