"""The command line as a user meets it: what it prints where, its exit codes, and one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import lowtide
from data.written_files import write_folder
from lowtide import cli
from lowtide.data.batches import BatchKey
from lowtide.data.load import load_images
from lowtide.train.densenet import load_data, load_trained
from train.small_runs import assert_same_run

TINY = [
    *("train", "densenet", "--depth", "10", "--growth-rate", "4", "--epochs", "2", "--batch-size", "32"),
    *("--limit-train", "96", "--limit-test", "50", "--log-every", "1", "--no-tensorboard"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert cli.run([*TINY, "--out", str(folder), "--json"]) == 0
    return folder


def test_alone_and_with_help_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert cli.run(argv) == 0
        out = capsys.readouterr().out
        for name in cli.available():
            assert f"  {name} " in out
    assert cli.run(["train"]) == 0
    out = capsys.readouterr().out
    assert "train densenet" in out
    assert "predict" not in out
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"lowtide {lowtide.__version__}\n"


@pytest.mark.parametrize("name", sorted(cli.available()))
def test_every_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.run([*name.split(), "--help"])
    assert stop.value.code in (0, None)
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: lowtide {name}")
    assert captured.err == ""
    assert "--json" in captured.out


def test_every_registered_command_belongs_to_the_installation_or_is_not_listed() -> None:
    assert {"demo", "train densenet", "eval", "predict"} <= set(cli.available())
    assert set(cli.available()) <= set(cli.COMMANDS)


MISTAKES = {
    "unknown command": (["trian"], "expected a command (demo, "),
    "unknown model": (["train", "resnet"], "got 'train resnet'"),
    "unknown flag": (["train", "densenet", "--dept", "40"], "lowtide train densenet: "),
    "no number": (["train", "densenet", "--depth", "x"], "Error parsing --depth: invalid literal for int()"),
    "unknown level": (
        ["train", "densenet", "--recompute", "leyer"],
        "invalid choice 'leyer' for argument '--recompute'",
    ),
    "missing value": (["train", "densenet", "--depth"], "Missing value for argument '--depth'"),
    "no checkpoint": (["eval", "absent.pt"], "absent.pt: expected a checkpoint, got no such file"),
    "no run": (["train", "densenet", "--out", "absent", "--resume"], "absent: expected a run, got none"),
    "no data": (["train", "densenet", "--data", "cifar10", "--data-dir", "absent"], "expected the folder of CIFAR10"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, said = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    assert cli.run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not any(sign in captured.err for sign in "│╭╰─")
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from lowtide import cli; cli.run(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('torchvision', 'tyro', 'sklearn', 'lowtide.models')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: lowtide COMMAND")


def test_training_prints_the_result_alone_on_stdout(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    # a finished run that is resumed tells its result again
    assert cli.run([*TINY, "--out", str(trained), "--resume", "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == summary
    assert captured.err == ""
    assert cli.run([*TINY, "--out", str(trained), "--resume"]) == 0
    out = capfd.readouterr().out
    assert f"test error {summary['test_error_percent']:.2f} %" in out
    assert str(trained / "last.pt") in out


def test_progress_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*TINY, "--out", str(tmp_path / "run")]) == 0
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    assert "parameters, memory level pointwise, cpu; digits: 96 training, 11 validation, 50 test pictures" in lines[0]
    assert lines[1].startswith("epoch 1/2  lr 0.1  train loss ")
    assert lines[2].startswith("epoch 2/2  lr 0.001  train loss ")
    for line in lines[1:]:
        assert "validation loss" in line
        assert "samples/s" in line
        assert "peak memory" in line
    assert len(lines) == 3
    assert captured.out.startswith("test error ")


def test_an_existing_run_is_refused_and_a_changed_flag_too(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    assert cli.run([*TINY, "--out", str(trained)]) == 2
    assert "continue it with --resume, replace it with --overwrite" in capsys.readouterr().err
    for flags, said in (
        (["--seed", "3"], "expected --seed 0, as the run was started, got 3"),
        (["--epochs", "5"], "expected --epochs 2, as the run was started, got 5"),
        (["--data", "fashion-mnist"], "expected --data digits"),
    ):
        assert cli.run(["train", "densenet", "--out", str(trained), "--resume", *flags]) == 2
        assert said in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    # what changes no number may change; flags that are not given are those of the run
    flags = ["--recompute", "layer", "--checkpoint-every", "7", "--json"]
    assert cli.run(["train", "densenet", "--out", str(trained), "--resume", *flags]) == 0


def test_eval_finds_the_error_of_the_training_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert cli.run(["eval", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "part": "test",
        "loss": pytest.approx(summary["test_loss"], rel=1e-5),
        "error_percent": summary["test_error_percent"],
        "n_targets": 50,
    }
    assert cli.run(["eval", str(trained / "best.pt"), "--part", "validation", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert best["error_percent"] == pytest.approx(summary["best_validation_error_percent"])
    assert cli.run(["eval", str(trained), "--best", "--part", "validation"]) == 0
    assert capsys.readouterr().out.startswith(f"validation error {best['error_percent']:.2f} %")


def test_eval_refuses_data_of_other_classes(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, ("ant", "bee"), per_class=6)
    assert cli.run(["eval", str(trained), "--data", f"folder:{tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert (
        "expected 1-channel pictures of 0, 1, 2, ... (10 classes), got 3-channel pictures of ant, bee (2 classes)"
        in error
    )


def test_predict_reads_a_picture_as_training_did(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test pictures as PNG files: each gets the class that the network gives to the stored picture."""
    test = load_images("digits").test
    paths = []
    for row in range(12):
        paths.append(tmp_path / f"{row}.png")
        Image.fromarray(test.source.image(row).squeeze(0).numpy()).save(paths[-1])
    assert cli.run(["predict", str(trained), *map(str, paths), "--top", "2", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)

    with torch.no_grad():
        probabilities = load_trained(trained).model(*_inputs(trained, BatchKey(0, tuple(range(12))))).softmax(dim=1)
    for path, row in zip(paths, probabilities, strict=True):
        (first, p), (_, q) = answers[str(path)]
        assert first == str(int(row.argmax()))
        assert abs(p - float(row.max())) < 1e-5
        assert p >= q
    assert cli.run(["predict", str(trained), str(paths[0])]) == 0
    assert capsys.readouterr().out.startswith(f"{paths[0]}: {answers[str(paths[0])][0][0]} ")
    assert cli.run(["predict", str(trained), str(tmp_path / "absent.png")]) == 2
    assert "absent.png: expected a readable picture, got No such file" in capsys.readouterr().err


def _inputs(trained: Path, key: BatchKey) -> tuple[torch.Tensor, ...]:

    network = load_trained(trained)
    return load_data(network.options, network.preprocessing).test[key].inputs


def _start(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowtide", *TINY, "--checkpoint-every", "2", "--epochs", "8", "--out", str(folder)]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _wait_for_lines(path: Path, n: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < n:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_and_ctrl_c_from_outside_then_resume(tmp_path: Path) -> None:
    """The real command: killed, resumed, stopped by Ctrl-C, resumed as it says; equal to a whole run."""
    whole = _start(tmp_path / "whole")
    assert "test pictures" in whole.communicate()[1]
    assert whole.returncode == 0

    folder = tmp_path / "run"
    process = _start(folder)
    _wait_for_lines(folder / "log.jsonl", 7, process)
    process.kill()
    process.communicate()

    process = _start(folder, "--resume")
    _wait_for_lines(folder / "log.jsonl", 12, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert f"to continue: lowtide train densenet --out {folder} --resume" in err
    assert "Traceback" not in err

    command = err.strip().splitlines()[-1].split("to continue: ")[1].split()
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "continuing" in done.stderr
    assert_same_run(folder, tmp_path / "whole")


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "train", "densenet", "--help"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in error
