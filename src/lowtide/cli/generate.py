"""`lowtide stream generate`: bytes from a trained byte-level model, each at the same cost."""

from __future__ import annotations

import itertools
import json as json_format
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import torch
import tyro

from lowtide.data.text import VOCABULARY
from lowtide.errors import ArgumentError, DataError, describe
from lowtide.measure.units import format_seconds
from lowtide.models import SequenceModel
from lowtide.stream import generate_tokens
from lowtide.train.evaluate import model_device
from lowtide.train.files import replacing
from lowtide.train.sgconv import load_trained

FLUSH_EVERY = 64  # bytes: often enough to be read as they come


def generate(
    *,
    model: str,
    prompt: str = "\n",
    prompt_file: Path | None = None,
    bytes: Annotated[int, tyro.conf.arg(metavar="INT")] = 2000,
    temperature: float = 1.0,
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None,
    seed: int = 0,
    output: Path | None = None,
    best: bool = False,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Continue a prompt by a model that was trained with lowtide train sgconv --data text:PATH.

    Writes what follows the prompt, as it is drawn: raw bytes, which need not be valid UTF-8.

    Args:
        model: A run's folder or a checkpoint file; or module:factory or file.py:factory of a causal SequenceModel of
            256 tokens.
        prompt: Text to continue.
        prompt_file: File to continue, instead of a prompt.
        bytes: How many bytes to write.
        temperature: 1 draws as the model says, 0 takes the likeliest byte, above 1 draws more evenly.
        top_k: Draw from the so many likeliest bytes only.
        seed: The same seed, the same bytes (on the same machine and number of threads).
        output: File to write instead of standard output; it appears when it is complete.
        best: Of a run's folder, take the weights with the least validation error instead of the last ones.
        device: cpu, cuda, cuda:1; auto takes a GPU if there is one.
        json: Print one line of JSON instead: the text with bytes that are no UTF-8 replaced, and the seconds.
    """
    if bytes < 0:
        raise ArgumentError(describe(expected="0 or more", got=bytes, where="--bytes"))
    content = prompt.encode("utf-8", "surrogateescape") if prompt_file is None else _read(prompt_file)
    if not content:
        where = "--prompt" if prompt_file is None else str(prompt_file)
        raise ArgumentError(describe(expected="one byte or more to continue", got="none", where=where))
    network = _model(model, best, device)
    at = model_device(network)
    start = time.perf_counter()
    tokens = generate_tokens(
        network,
        torch.tensor([list(content)], device=at),
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(at).manual_seed(seed),
    )
    drawn = (int(token) for token in itertools.islice(tokens, bytes))
    if json:
        values = bytearray(drawn)
        seconds = time.perf_counter() - start
        if output is not None:
            _save(output, iter(values))
        text = values.decode("utf-8", "replace")
        where = None if output is None else str(output)
        print(json_format.dumps({"bytes": len(values), "seconds": seconds, "output": where, "text": text}))
        return
    if output is None:
        sys.stdout.flush()
        _write(sys.stdout.buffer, drawn)
    else:
        _save(output, drawn)
    seconds = time.perf_counter() - start
    print(f"\n{len(content)} bytes of prompt, {bytes} bytes more in {format_seconds(seconds)}", file=sys.stderr)


def _model(name: str, best: bool, device: str) -> SequenceModel:
    if ":" in name and not Path(name).exists():
        from lowtide.models.resolve import resolve_model  # only where a name is to be imported

        found, _ = resolve_model(name)
        if not isinstance(found, SequenceModel):
            raise ArgumentError(describe(expected="a SequenceModel", got=type(found).__name__, where=name))
        network = found.eval()
    else:
        network = load_trained(Path(name), device, best).model
    vocabulary = network.decoder.out_features
    if vocabulary != VOCABULARY:
        got = f"one with {vocabulary} outputs"
        fix = "train one with lowtide train sgconv --data text:PATH"
        raise ArgumentError(describe(expected=f"a model of {VOCABULARY} bytes", got=got, where=name, fix=fix))
    return network


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(describe(expected="a readable file", got=error.strerror, where=str(path))) from None


def _save(path: Path, values: Iterator[int]) -> None:
    with replacing(path, fix="choose another --output, or free some space") as file:
        _write(file, values)


def _write(file: IO[bytes], values: Iterator[int]) -> None:
    while some := bytearray(itertools.islice(values, FLUSH_EVERY)):
        file.write(some)
        file.flush()
