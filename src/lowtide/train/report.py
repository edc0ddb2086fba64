"""What a run tells while it goes on: `Reporter` says nothing, `TerminalReporter` draws on a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lowtide.measure.units import format_bytes
from lowtide.train.log import Row
from lowtide.train.objective import say_loss


@dataclass(frozen=True)
class StepView:
    """One optimiser step, as it is shown."""

    epoch: int
    step_in_epoch: int
    loss: float
    error_percent: float
    samples_per_second: float
    memory_bytes: int
    peak_memory_bytes: int


class Reporter:
    """Hears of everything and shows nothing; the base of those that show."""

    def begin(self, epochs: int, steps_per_epoch: int) -> None: ...

    def step(self, view: StepView) -> None: ...

    def epoch(self, row: Row) -> None: ...

    def note(self, text: str) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NoteReporter(Reporter):
    """Prints the notes alone, on stderr."""

    def note(self, text: str) -> None:
        Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)


class TerminalReporter(Reporter):
    """A bar for the epoch in hand and a line per epoch, on stderr, so that stdout holds results alone."""

    def __init__(self, samples: str = "samples") -> None:
        """`samples`: what is counted; of "bytes" the loss is told in bits."""
        self._samples = samples
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[view]}"),
            console=self._console,
            transient=True,
            # not a terminal (a log file): no bar, only the lines
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._epochs = 0

    def begin(self, epochs: int, steps_per_epoch: int) -> None:
        self._epochs = epochs
        self._task = self._progress.add_task("", total=steps_per_epoch, view="")
        self._progress.start()

    def step(self, view: StepView) -> None:
        assert self._task is not None
        self._progress.update(
            self._task,
            description=f"epoch {view.epoch + 1}/{self._epochs}",
            completed=view.step_in_epoch,
            view=f"{say_loss(view.loss, self._samples)}  error {view.error_percent:.1f} %  "
            f"{view.samples_per_second:.0f} {self._samples}/s  "
            f"memory {format_bytes(view.memory_bytes)}, peak {format_bytes(view.peak_memory_bytes)}",
        )

    def epoch(self, row: Row) -> None:
        assert isinstance(row["epoch"], int)
        assert isinstance(row["peak_memory_bytes"], int)
        parts = [
            f"epoch {row['epoch'] + 1}/{self._epochs}",
            f"lr {row['lr']:g}",
            self._say("train", row["train_loss"], row["train_error_percent"]),
        ]
        if row["validation_error_percent"] is not None:
            parts.append(self._say("validation", row["validation_loss"], row["validation_error_percent"]))
        parts.append(f"{row['samples_per_second']:.0f} {self._samples}/s")
        parts.append(f"peak memory {format_bytes(row['peak_memory_bytes'])}")
        self._console.print("  ".join(parts), soft_wrap=True)

    def _say(self, part: str, loss: float | str | None, error_percent: float | str | None) -> str:
        assert isinstance(loss, float)
        return f"{part} {say_loss(loss, self._samples)} error {error_percent:.2f} %"

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
