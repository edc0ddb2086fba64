"""`lowtide train densenet`: flags, saved options of a run that is resumed, and the result as text or JSON.

`lowtide train sgconv` (train_sgconv.py) shares `train_and_tell`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.cli.parsing import parse
from lowtide.distributed.world import is_main_process, was_restarted
from lowtide.measure.units import format_bytes
from lowtide.train.densenet import KIND, DenseNetOptions, run_name, train_densenet
from lowtide.train.interrupt import Interrupted
from lowtide.train.loop import Summary
from lowtide.train.objective import say_loss
from lowtide.train.options import check_unchanged
from lowtide.train.report import Reporter, TerminalReporter
from lowtide.train.run import Run


@dataclass(frozen=True)
class DenseNetFlags(DenseNetOptions):
    # the flags of the command line beside the options that make the run what it is
    __doc__ = DenseNetOptions.__doc__

    out: Path | None = None
    """Folder of the run (default: runs/ and a name made of the options)."""
    resume: bool = False
    """Continue the run in --out, bit for bit, with the options it was started with."""
    overwrite: bool = False
    """Replace the run in --out."""
    json: bool = False
    """Print the result as JSON, and no progress."""
    memory: str | None = None
    """Memory for the tensors of a step, as 2GiB: chooses --recompute, or refuses; torch itself comes on top."""


def densenet(prog: str, args: Sequence[str]) -> None:
    """Train. Options of a resumed run come from its folder; a flag that differs from them is refused."""
    flags = parse(prog, DenseNetFlags, args, flag_pairs=True)
    run = Run(flags.out or Path("runs") / run_name(flags))
    options = _options(flags)
    resume = goes_on(flags.resume, run)
    if resume:
        saved = DenseNetOptions.from_json(run.options(KIND), str(run.folder))
        # parsed again with the saved options as defaults: what differs now was given on the command line
        defaults = DenseNetFlags(**dataclasses.asdict(saved), out=flags.out)
        options = _options(parse(prog, DenseNetFlags, args, default=defaults, flag_pairs=True))
        check_unchanged(saved, options, str(run.folder))
    if flags.memory is not None:
        from lowtide.train.within import densenet_within

        options, line = densenet_within(options, flags.memory)
        say(line, flags.json)
    start = functools.partial(train_densenet, options)
    train_and_tell(prog, run, start, resume, flags.overwrite, flags.json, "pictures")


def say(line: str, as_json: bool) -> None:
    """A line of the main process, in front of the progress."""
    if is_main_process() and not as_json:
        print(line)


def goes_on(resume: bool, run: Run) -> bool:
    """Whether the run in the folder is continued: asked for, or begun before torchrun started the processes anew."""
    return resume or (was_restarted() and run.exists)


def train_and_tell(
    prog: str, run: Run, start: Callable[..., Summary], resume: bool, overwrite: bool, as_json: bool, samples: str
) -> None:
    """Train by `start(run, resume=, overwrite=, reporter=)`, unless the run has ended, and print the result."""
    finished = run.summary() if resume else None
    shown = TerminalReporter("bytes" if samples == "bytes" else "samples")
    reporter = Reporter() if as_json or not is_main_process() else shown
    try:
        if finished:
            summary = Summary(**finished)
        else:
            summary = start(run, resume=resume, overwrite=overwrite, reporter=reporter)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; to continue: {prog} --out {run.folder} --resume") from None
    if is_main_process():
        print(json.dumps(dataclasses.asdict(summary)) if as_json else _text(summary, samples))


def _options(flags: DenseNetFlags) -> DenseNetOptions:
    return DenseNetOptions(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(DenseNetOptions)})


def _text(summary: Summary, samples: str) -> str:
    best = summary.best_validation_error_percent
    lines = [
        f"test error {summary.test_error_percent:.2f} % ({say_loss(summary.test_loss, samples)}) on {summary.n_test} "
        f"{samples}",
        f"train error {summary.train_error_percent:.2f} % ({say_loss(summary.train_loss, samples)}) in the last epoch",
        "best validation error " + ("none was held out" if best is None else f"{best:.2f} %"),
        f"{summary.steps} steps in {summary.seconds:.0f} s, peak memory {format_bytes(summary.peak_memory_bytes)}",
        f"weights: {summary.checkpoint}",
    ]
    return "\n".join(lines)
