"""Sampling: streamed logits against the whole forward, the drawing, and a model trained here on a text made here."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import relative_error

from lowtide import cli
from lowtide.errors import ArgumentError, UnsupportedError
from lowtide.models import SequenceModel
from lowtide.stream import generate, generate_tokens, sample_tokens
from lowtide.train.sgconv import load_trained


def make_model(vocabulary: int = 11, **options) -> SequenceModel:
    """Untrained, with batch statistics and weights that matter; kernels of 64 taps."""
    torch.manual_seed(0)
    keywords = {"pool": None, "embedding": vocabulary, "kernel_dim": 8, "bidirectional": False, **options}
    model = SequenceModel(1, vocabulary, 12, 3, 64, **keywords).double()
    for _ in range(3):
        model(torch.randint(0, 2 if "pool" in options else vocabulary, (4, 50)))
    with torch.no_grad():
        model.decoder.weight.mul_(6)  # so that the likeliest token is likely
    return model.eval()


MODELS = {
    "batch": {},
    "layer, glu": {"norm": "layer", "postact": "glu"},
    "behind": {"prenorm": False, "channels": 2},
    "power": {"decay": "power", "decay_min": 0.5},
}


@torch.no_grad()
def streamed_logits(model: SequenceModel, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """prefill of a prompt, then step by step."""
    first, state = model.prefill(tokens[:, :prompt], model.initial_state(len(tokens)))
    rest = [model.step(tokens[:, t], state)[0] for t in range(prompt, tokens.shape[1])]
    return torch.cat([first, torch.stack(rest, 1)], 1)


@pytest.mark.parametrize("name", MODELS)
def test_streamed_logits_equal_the_whole_forward(name: str) -> None:
    """Beyond the taps of all three layers together."""
    model = make_model(**MODELS[name])
    tokens = torch.randint(0, 11, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens)
    for prompt in (1, 70):
        got = streamed_logits(model, tokens, prompt)
        assert relative_error(got, want) < 1e-12
        # a shift by one position would be seen
        assert relative_error(got[:, 1:], want[:, :-1]) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_continuation_is_that_of_the_whole_forward(name: str) -> None:
    model = make_model(**MODELS[name])
    prompt = torch.tensor([[3, 1, 4], [2, 7, 1]])
    got = generate(model, prompt, 150, temperature=0)
    assert got.shape == (2, 150)
    assert got.dtype == torch.int64
    assert len(got.unique()) > 1
    with torch.no_grad():
        whole = model(torch.cat([prompt, got], 1))
    assert torch.equal(whole[:, 2:-1].argmax(-1), got)
    for row in range(2):
        assert torch.equal(generate(model, prompt[row : row + 1], 150, temperature=0)[0], got[row])


def probabilities(logits: np.ndarray, temperature: float, top_k: int | None) -> np.ndarray:
    """Written out: the weight of each token, with its neighbours' left out."""
    kept = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.zeros(len(logits))
    for token in kept:
        weights[token] = math.exp(logits[token] / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 50])
def test_draws_have_the_stated_probabilities(temperature: float, top_k: int | None) -> None:
    """100,000 draws of 7 tokens: each count within five deviations, in both rows of a batch."""
    logits = np.array([[0.1, 2.0, -1.0, 1.4, 0.0, -3.0, 1.9], [1.0, 0.0, 2.0, -2.0, 0.5, 0.2, -0.1]])
    n = 100_000
    drawn = sample_tokens(
        torch.tensor(np.repeat(logits, n, 0)), temperature=temperature, top_k=top_k,
        generator=torch.Generator().manual_seed(0),
    ).view(2, n)  # fmt: skip
    for row in range(2):
        p = probabilities(logits[row], temperature, top_k)
        counts = np.bincount(drawn[row].numpy(), minlength=7)
        assert np.all(np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9), (counts, n * p)
        # a neighbouring temperature, or one token more, would be seen
        for other in (probabilities(logits[row], 1.5 * temperature, top_k), probabilities(logits[row], temperature, 2)):
            if not np.allclose(other, p, atol=1e-3):
                assert np.any(np.abs(counts - n * other) > 5 * np.sqrt(n * other * (1 - other)) + 1e-9)


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3]], dtype=torch.bfloat16)
    for temperature in (0, 1e-30, 1e-3):
        assert sample_tokens(logits, temperature=temperature).tolist() == [0]
    drawn = sample_tokens(logits.expand(3000, 3), temperature=1e30, generator=torch.Generator().manual_seed(0))
    assert np.all(np.abs(np.bincount(drawn.numpy(), minlength=3) - 1000) < 5 * math.sqrt(3000 * 2 / 9))


def test_a_seed_decides_and_the_global_generator_is_left_alone() -> None:
    model = make_model()
    prompt = torch.tensor([[1], [1]])
    before = torch.get_rng_state()
    one, again, other = (generate(model, prompt, 40, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])  # rows are drawn one by one
    # without a generator it is the global one that decides
    torch.manual_seed(7)
    first = generate(model, prompt, 40)
    torch.manual_seed(7)
    assert torch.equal(first, generate(model, prompt, 40))


def test_tokens_come_one_by_one_and_a_length_of_none_is_none() -> None:
    model = make_model()
    prompt = torch.tensor([[1, 2]])
    tokens = generate_tokens(model, prompt, generator=torch.Generator().manual_seed(0))
    some = torch.stack(list(itertools.islice(tokens, 10)), 1)
    more = torch.stack(list(itertools.islice(tokens, 10)), 1)
    whole = generate(model, prompt, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([some, more], 1), whole)
    assert generate(model, prompt, 0).shape == (1, 0)


def test_what_cannot_be_sampled_is_refused() -> None:
    model = make_model()
    prompt = torch.tensor([[1, 2]])
    for options in ({"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": 0}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            generate_tokens(model, prompt, **options)
    for wrong in (torch.tensor([1, 2]), torch.zeros(1, 2), torch.zeros(1, 0, dtype=torch.int64)):
        with pytest.raises(ArgumentError, match=r"prompt: expected integers \(B, T\)"):
            generate_tokens(model, wrong)
    for wrong in (torch.tensor([[11]]), torch.tensor([[-1]])):
        with pytest.raises(ArgumentError, match=r"tokens 0 \.\. 10"):
            generate_tokens(model, wrong)
    with pytest.raises(ArgumentError, match="length of 0 or more"):
        generate(model, prompt, -1)
    with pytest.raises(ArgumentError, match="finite logits"):
        sample_tokens(torch.tensor([[0.0, math.nan]]))
    for other in (make_model(pool="mean"), SequenceModel(1, 5, 12, 1, 64, pool=None, embedding=7, bidirectional=False)):
        with pytest.raises(UnsupportedError, match="a model of tokens"):
            generate_tokens(other.eval(), prompt)
    with pytest.raises(UnsupportedError, match="causal"):
        generate_tokens(make_model(bidirectional=True), prompt)
    with pytest.raises(UnsupportedError, match="eval mode"):
        generate_tokens(make_model().train(), prompt)


def made_text(n: int) -> bytes:
    """Sentences by a small grammar, with bytes beyond ASCII."""
    draw = random.Random(0)
    nouns, verbs = ("tide", "moon", "harbour", "café", "ship"), ("sees", "lifts", "leaves", "follows")
    lines = []
    while sum(map(len, lines)) < n:
        one, other = draw.sample(nouns, 2)
        lines.append(f"the {one} {draw.choice(verbs)} the {other}.\n".encode())
    return b"".join(lines)[:n]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and a run that was trained on it by the command."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(made_text(40_000))
    flags = "--text-length 64 --d-model 32 --n-layers 2 --kernel-dim 8 --batch-size 16 --epochs 4 --no-tensorboard"
    with contextlib.chdir(folder):
        assert cli.run(["train", "sgconv", "--data", "text:text.txt", *flags.split(), "--out", "run", "--json"]) == 0
    return folder


def entropy_of_bytes(content: bytes) -> float:
    """Bits per byte of the best guess that knows no context."""
    p = np.bincount(np.frombuffer(content, np.uint8), minlength=256) / len(content)
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


def test_the_model_has_learnt_and_eval_says_bits_per_byte(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = (trained / "text.txt").read_bytes()
    held_out = content[34_000:38_000]
    model = load_trained(trained / "run").model
    assert model.pool is None
    assert not model.blocks[0].layer.form.bidirectional
    rows = torch.tensor(list(held_out[: 62 * 64 + 1]))
    x, target = rows[:-1].view(62, 64), rows[1:].view(62, 64)
    with torch.no_grad():
        log_p = model(x).log_softmax(-1).gather(-1, target.unsqueeze(-1))
    bits = -log_p.double().mean().item() / math.log(2)
    assert bits < 0.5 * entropy_of_bytes(held_out)
    with contextlib.chdir(trained):
        assert cli.run(["eval", "run", "--part", "validation"]) == 0
        assert f"({bits:.4f} bits per byte) on 3968 bytes" in capfd.readouterr().out
        assert cli.run(["eval", "run", "--data", "digits"]) == 2
        assert "256 tokens and 256 classes for each position" in capfd.readouterr().err
        assert cli.run(["train", "sgconv", "--out", "run", "--resume"]) == 0
        assert "bits per byte) on 1984 bytes" in capfd.readouterr().out


def test_generated_bytes_and_their_logits(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """2,000 bytes by the command; each is the likeliest of the whole forward, whose logits the stream has."""
    command = ["stream", "generate", "--model", "run", "--prompt", "the moon ", "--bytes", "2000"]
    with contextlib.chdir(trained):
        assert cli.run([*command, "--temperature", "0", "--output", "greedy.txt"]) == 0
        assert "9 bytes of prompt, 2000 bytes more" in capfd.readouterr().err
    written = (trained / "greedy.txt").read_bytes()
    assert len(written) == 2000
    model = load_trained(trained / "run").model
    tokens = torch.tensor([list(b"the moon " + written)])
    oracle, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    plain.set_recompute("none")
    with torch.no_grad():
        want, theirs = oracle(tokens), plain(tokens)
    got = streamed_logits(model, tokens, 9)
    assert relative_error(got, want) <= 2 * relative_error(theirs, want) + 4 * torch.finfo(torch.float32).eps
    assert relative_error(streamed_logits(oracle, tokens, 9), want) < 1e-12
    assert torch.equal(want[0, 8:-1].argmax(-1), tokens[0, 9:])


@pytest.mark.parametrize("model", ["run", "run/last.pt"])
def test_logits_of_a_whole_file(trained: Path, capfd: pytest.CaptureFixture[str], model: str) -> None:
    """`stream apply` with the run's folder or its checkpoint, on the bytes of a text."""
    command = ["stream", "apply", "--model", model, "--input", "part.txt", "--shape", "700", "--output", "logits.npy"]
    content = (trained / "text.txt").read_bytes()[:700]
    (trained / "part.txt").write_bytes(content)
    with contextlib.chdir(trained):
        assert cli.run([*command, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["shape"] == [700, 256]
        got = torch.from_numpy(np.load("logits.npy"))
        assert cli.run([*command[:3], "text.txt", *command[4:]]) == 2
        assert capfd.readouterr().err.count("\n") == 1
    network = load_trained(trained / "run").model.double()
    with torch.no_grad():
        assert relative_error(got, network(torch.tensor([list(content)]))[0]) < 1e-6


def run_for_bytes(arguments: list[str]) -> bytes:
    """What the command writes to standard output."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out):
        assert cli.run(["stream", "generate", *arguments]) == 0
    return out.buffer.getvalue()


def test_the_command_line(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(trained):
        model = ["--model", "run", "--top-k", "20", "--temperature", "0.4"]
        one, again = (run_for_bytes([*model, "--bytes", "300", "--seed", "1"]) for _ in range(2))
        other = run_for_bytes([*model, "--bytes", "300", "--seed", "2", "--best"])
        assert len(one) == len(other) == 300
        assert one == again != other
        # it speaks the language: most words are the text's
        words, known = one.split()[1:-1], set((trained / "text.txt").read_bytes().split())
        assert len(words) > 20
        assert sum(word in known for word in words) > 0.8 * len(words)
        Path("prompt.bin").write_bytes("the café ".encode())
        by_file = run_for_bytes([*model, "--bytes", "50", "--prompt-file", "prompt.bin"])
        assert by_file == run_for_bytes([*model, "--bytes", "50", "--prompt", "the café "])
        assert run_for_bytes([*model, "--bytes", "0"]) == b""
        told = json.loads(run_for_bytes([*model, "--bytes", "300", "--seed", "1", "--json", "--output", "out.txt"]))
        assert (told["bytes"], told["text"], told["output"]) == (300, one.decode("utf-8", "replace"), "out.txt")
        assert Path("out.txt").read_bytes() == one
        capfd.readouterr()
        for arguments, message in {
            "--model absent": "absent",
            "--model run --bytes -1": "--bytes",
            "--model run --temperature -1": "temperature",
            "--model run --top-k 0": "top_k",
            "--model run --prompt-file absent.txt": "absent.txt: expected a readable file",
            "--model run --prompt=": "--prompt: expected one byte or more",
            "--model text.txt": "text.txt",
            "--model lowtide:densenet121": "expected a SequenceModel, got DenseNet",
            "--model run --output absent/out.txt": "absent/out.txt",
        }.items():
            assert cli.run(["stream", "generate", *arguments.split()]) == 2, arguments
            error = capfd.readouterr().err
            assert message in error
            assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data text:text.txt --bidirectional", "expected --no-bidirectional for a text"),
        ("--data text:text.txt --pool mean", "--pool: expected none for a text"),
        ("--data digits --pool none", "--pool: expected none for a text"),
        ("--preset text", "--preset text: expected --data text:PATH, got none"),
        ("--data text:absent.txt", "absent.txt: expected a text file"),
    ],
)
def test_flags_that_do_not_go_together(
    trained: Path, capfd: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    with contextlib.chdir(trained):
        assert cli.run(["train", "sgconv", *flags.split(), "--out", "other"]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (trained / "other").exists()
