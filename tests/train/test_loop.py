"""The loop's arithmetic against one written by hand, and what it does when something is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.data.batches import Batch, BatchKey, EpochPlan
from lowtide.errors import NonFiniteError
from lowtide.train.checkpoint import load_checkpoint
from lowtide.train.evaluate import evaluate
from lowtide.train.objective import Scores, classification
from lowtide.train.report import Reporter, StepView
from train.small_runs import SmallOptions, log_rows, same, small_data, small_model, small_run, weights


def plain_model() -> nn.Sequential:
    """Without dropout and batch norm, so that micro-batches and one batch are the same function."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(1024, 16), nn.Tanh(), nn.Linear(16, 10))


ONE_EPOCH = dataclasses.replace(SmallOptions(), epochs=1, precision="float64", accumulate=1)


def test_training_equals_a_loop_by_hand(tmp_path: Path) -> None:
    """Nesterov SGD with weight decay and two drops, written out; momentum as torch defines it."""
    options = dataclasses.replace(ONE_EPOCH, epochs=2)
    model = plain_model().double()
    small_run(tmp_path / "run", options, model=model)

    data, other = small_data(), plain_model().double()
    parameters = list(other.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    losses, step = [], 0
    for epoch in range(2):
        for keys in EpochPlan(200, 24, seed=0).keys(epoch):
            batch = data.train[keys[0]]
            loss = F.cross_entropy(other(batch.inputs[0].double()), batch.target)
            losses.append(loss.item())
            lr = 0.05 * 0.1 ** ((step >= 12) + (step >= 20))
            for p, v, g in zip(parameters, velocity, torch.autograd.grad(loss, parameters), strict=True):
                with torch.no_grad():
                    g = g + 1e-4 * p
                    v.copy_(g if step == 0 else 0.9 * v + g)
                    p -= lr * (g + 0.9 * v)
            step += 1
    logged = [row["loss"] for row in log_rows(tmp_path / "run") if row["event"] == "step"]
    assert len(logged) == len(losses) == 18
    assert max(abs(a - b) for a, b in zip(logged, losses, strict=True)) < 1e-12
    for p, q in zip(model.parameters(), parameters, strict=True):
        assert torch.allclose(p, q, rtol=1e-11, atol=1e-14)
    assert losses[-1] < losses[0] - 0.1, "it must have learnt, or nothing was compared"


@pytest.mark.parametrize("accumulate", [2, 3])
def test_micro_batches_add_up_to_the_batch(tmp_path: Path, accumulate: int) -> None:
    """Uneven ones too: 24 = 8 + 8 + 8, and the epoch's last step of 8 = 3 + 3 + 2."""
    runs = {}
    for n in (1, accumulate):
        model = plain_model().double()
        small_run(tmp_path / f"{n}", dataclasses.replace(ONE_EPOCH, accumulate=n), model=model)
        runs[n] = [p.detach() for p in model.parameters()]
    rows = [[row["loss"] for row in log_rows(tmp_path / f"{n}") if row["event"] == "step"] for n in runs]
    assert len(rows[0]) == 9
    assert max(abs(a - b) for a, b in zip(*rows, strict=True)) < 1e-12
    for p, q in zip(*runs.values(), strict=True):
        assert torch.allclose(p, q, rtol=1e-11, atol=1e-14)
        assert not torch.allclose(p, q * 1.01, rtol=1e-11, atol=1e-14)


def test_the_epochs_row_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    small_run(tmp_path / "run", ONE_EPOCH, model=plain_model().double())
    rows = log_rows(tmp_path / "run")
    sizes = [24] * 8 + [8]
    steps = [row for row in rows if row["event"] == "step"]
    epoch = next(row for row in rows if row["event"] == "epoch")
    mean = sum(n * row["loss"] for n, row in zip(sizes, steps, strict=True)) / 200
    error = sum(n * row["error_percent"] for n, row in zip(sizes, steps, strict=True)) / 200
    assert abs(epoch["train_loss"] - mean) < 1e-12
    assert abs(epoch["train_error_percent"] - error) < 1e-9
    assert [row["step"] for row in steps] == list(range(1, 10))


def test_evaluation_counts_every_sample_once_and_keeps_the_mode() -> None:
    data, model = small_data(), small_model()
    model[3].eval()
    modes = [module.training for module in model.modules()]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    found = evaluate(model, data.test, classification, batch_size=7)
    assert [module.training for module in model.modules()] == modes
    assert same(dict(model.named_buffers()), buffers)
    model.eval()
    batch = data.test[BatchKey(0, tuple(range(50)))]
    output = model(batch.inputs[0])
    wrong = sum(int(row.argmax() != y) for row, y in zip(output, batch.target, strict=True))
    assert found.n_targets == 50
    assert found.error_percent == 2 * wrong
    assert abs(found.loss - F.cross_entropy(output, batch.target).item()) < 1e-6


def test_the_test_set_is_read_once_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.data.images import ImageBatches

    parts: list[tuple[str, str]] = []
    data = small_data()
    names = {
        id(part): name for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test))
    }
    fetch = ImageBatches.__getitem__

    def recording(part: ImageBatches, key: BatchKey) -> Batch:
        parts.append((names[id(part)], "train" if model.training else "eval"))
        return fetch(part, key)

    monkeypatch.setattr(ImageBatches, "__getitem__", recording)
    monkeypatch.setattr("train.small_runs.small_data", lambda seed: data)
    model = plain_model()
    small_run(tmp_path / "run", dataclasses.replace(ONE_EPOCH, precision="float32", epochs=2), model=model)
    epoch = [("train", "train")] * 9 + [("validation", "eval")]
    assert parts == epoch * 2 + [("test", "eval")]


class PoisonAt(Reporter):
    """Puts a NaN into the weights after a step, as a blown-up run has."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self.model, self.step_number, self.before = model, step, {}

    def step(self, view: StepView) -> None:
        self.step_number -= 1
        if self.step_number == 0:
            with torch.no_grad():
                next(self.model.parameters())[0, 0] = torch.nan
            self.before = {k: v.clone() for k, v in self.model.named_parameters()}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    model = small_model()
    reporter = PoisonAt(model, 4)
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError) as caught:
        small_run(folder, model=model, reporter=reporter)
    keys = EpochPlan(200, 24, seed=0, accumulate=2).keys(0)[4]
    indices = [int(i) for key in keys for i in small_data().train.rows[list(key.positions)]]
    first = ", ".join(map(str, indices[:8]))
    expected = (
        f"step 5, epoch 1: expected a finite loss and gradient, got loss nan, gradient norm nan for 24 samples ({first}"
    )
    assert str(caught.value).startswith(expected)
    assert str(folder / "nonfinite.pt") in str(caught.value)
    saved = load_checkpoint(folder / "nonfinite.pt")
    assert saved["indices"].tolist() == indices
    assert saved["position"]["step"] == 4
    for name, value in reporter.before.items():
        assert torch.equal(saved["model"][name], value) or name == "0.weight"
    # the last good checkpoint is untouched, and the log ends with the last good step
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert [row["step"] for row in log_rows(folder)] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(tmp_path: Path) -> None:
    """The loss is finite: 1 for every output, but the slope of its square root at 0 is not."""
    model = plain_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def kinked(output: Tensor, batch: Batch) -> Scores:
        loss = (1 + (output - output.detach()).abs().sum().sqrt()) * len(batch.target)
        return Scores(loss, torch.zeros(()))

    with pytest.raises(NonFiniteError, match=r"step 1, epoch 1: .* got loss 1\.0, gradient norm nan"):
        small_run(tmp_path / "run", dataclasses.replace(ONE_EPOCH, precision="float32"), objective=kinked, model=model)
    assert same(model.state_dict(), before)


def test_a_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    model = plain_model()
    model.register_parameter("forgotten", nn.Parameter(torch.ones(1)))
    options = dataclasses.replace(ONE_EPOCH, precision="float32")
    with pytest.warns(UserWarning, match="1 parameters got no gradient, such as forgotten"):
        small_run(tmp_path / "run", options, model=model)


def test_bf16_runs_the_forward_in_bf16_and_keeps_float32_weights(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def recording(output: Tensor, batch: Batch) -> Scores:
        seen.append(output.dtype)
        return classification(output, batch)

    model = plain_model()
    small_run(tmp_path / "run", dataclasses.replace(ONE_EPOCH, precision="bf16"), objective=recording, model=model)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_what_the_reporter_hears(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Listening(Reporter):
        def begin(self, epochs: int, steps_per_epoch: int) -> None:
            heard.append((epochs, steps_per_epoch))

        def step(self, view: StepView) -> None:
            heard.append(view)

    small_run(tmp_path / "run", ONE_EPOCH, reporter=Listening(), model=plain_model().double())
    assert heard[0] == (1, 9)
    views = heard[1:]
    assert [view.step_in_epoch for view in views] == list(range(1, 10))
    for view in views:
        assert view.samples_per_second > 0
        assert 2**20 < view.memory_bytes <= view.peak_memory_bytes + 2**22
        assert 0 <= view.error_percent <= 100


def test_best_is_the_epoch_with_the_least_validation_error(tmp_path: Path) -> None:
    summary = small_run(tmp_path / "run", dataclasses.replace(SmallOptions(), epochs=5))
    errors = [row["validation_error_percent"] for row in log_rows(tmp_path / "run") if row["event"] == "epoch"]
    best = load_checkpoint(tmp_path / "run" / "best.pt")
    assert best["position"]["epoch"] == errors.index(min(errors)) + 1
    assert summary.best_validation_error_percent == min(errors)
    assert len(set(errors)) > 1
    model = small_model()
    model.load_state_dict(best["model"])
    validation = small_data().validation
    assert validation is not None
    assert evaluate(model, validation, classification, 64).error_percent == min(errors)


def test_tensorboard_gets_the_logs_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="not run: tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    small_run(folder, dataclasses.replace(ONE_EPOCH, tensorboard=True), model=plain_model().double())
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("step/loss")]
    rows = [row for row in log_rows(folder) if row["event"] == "step"]
    assert losses == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    assert len(events.Scalars("test/error_percent")) == 1
    assert json.loads((folder / "summary.json").read_text())["test_error_percent"] == pytest.approx(
        events.Scalars("test/error_percent")[0].value
    )
