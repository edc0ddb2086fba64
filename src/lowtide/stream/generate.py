"""Sampling from a causal sequence model: the prompt by `prefill`, then one `step` per token, each at the same cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, UnsupportedError, describe
from lowtide.models.sequence import SequenceModel


def sample_tokens(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """One token for each row: logits (B, V) -> (B,) int64.

    Probabilities are softmax(logits / temperature) among the `top_k` greatest logits, in float32 or float64.
    Temperature 0 takes the greatest, and draws no random number.

    Raises:
        ArgumentError: a temperature below 0 or not finite, top_k below 1, or logits that are not finite.
    """
    _check(temperature, top_k)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not logits.isfinite().all():
        got = "NaN or Inf"
        raise ArgumentError(describe(expected="finite logits", got=got, where="sampling", fix="train the model anew"))
    if temperature == 0:
        return logits.argmax(-1)
    candidates = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, candidates = logits.topk(top_k, dim=-1)
    # the greatest first: a small temperature must not lead to infinity less infinity
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return (drawn if candidates is None else candidates.gather(-1, drawn)).squeeze(-1)


def generate_tokens(
    model: SequenceModel,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Tokens (B,) that continue `prompt`, without end: take as many as you want.

    The logits are those of `model(all tokens so far)` at the last position, whatever the length: beyond l_max the
    window of the kernels holds for both.

    Args:
        model: tokens in, an output per position (pool=None), causal, in eval mode.
        prompt: (B, T) integers, T >= 1.
        temperature, top_k, generator: as `sample_tokens`; the generator is on the model's device.

    Raises:
        ArgumentError: a prompt of another shape or with tokens that the model does not have, or a bad option.
        UnsupportedError: a model that cannot generate; both at the call, before the first token.
    """
    _check(temperature, top_k)
    vocabulary = _vocabulary(model)
    if prompt.dim() != 2 or prompt.shape[0] < 1 or prompt.shape[1] < 1 or prompt.is_floating_point():
        got = f"{tuple(prompt.shape)} {str(prompt.dtype).removeprefix('torch.')}"
        raise ArgumentError(describe(expected="integers (B, T), T >= 1", got=got, where="prompt"))
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        got = f"{int(prompt.min())} .. {int(prompt.max())}"
        raise ArgumentError(describe(expected=f"tokens 0 .. {vocabulary - 1}", got=got, where="prompt"))
    state = model.initial_state(prompt.shape[0])

    def tokens() -> Iterator[Tensor]:
        logits = model.prefill(prompt, state)[0][:, -1]
        while True:
            token = sample_tokens(logits, temperature=temperature, top_k=top_k, generator=generator)
            yield token
            logits, _ = model.step(token, state)

    return tokens()


def generate(
    model: SequenceModel,
    prompt: Tensor,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The next `length` >= 0 tokens, (B, length) int64, without the prompt; arguments as `generate_tokens`."""
    if length < 0:
        raise ArgumentError(describe(expected="a length of 0 or more", got=length, where="generate"))
    tokens = generate_tokens(model, prompt, temperature=temperature, top_k=top_k, generator=generator)
    drawn = list(itertools.islice(tokens, length))
    return torch.stack(drawn, dim=1) if drawn else prompt.new_empty(prompt.shape[0], 0, dtype=torch.int64)


def _check(temperature: float, top_k: int | None) -> None:
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(describe(expected="a finite number, 0 or more", got=temperature, where="temperature"))
    if top_k is not None and top_k < 1:
        raise ArgumentError(describe(expected="at least 1", got=top_k, where="top_k"))


def _vocabulary(model: SequenceModel) -> int:
    """Tokens in, which must be the tokens out."""
    encoder, outputs = model.encoder, model.decoder.out_features
    inputs = encoder.num_embeddings if isinstance(encoder, nn.Embedding) else None
    if inputs != outputs or model.pool is not None:
        kind = f"{f'{inputs} tokens' if inputs else 'numbers'} in, {outputs} outputs, pool={model.pool!r}"
        expected = "a model of tokens with an output per position, as many as there are tokens"
        fix = "build it with embedding=V, d_output=V, pool=None, bidirectional=False"
        raise UnsupportedError(describe(expected=expected, got=kind, where="generate", fix=fix))
    return outputs
