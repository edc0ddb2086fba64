"""The command line: a registry of commands, each in a module that is imported only when the command is called.

A command is a typed function that tyro turns into flags; it calls the library and prints. It returns None or an exit
code. A `LowtideError` becomes one line on stderr and exit code 2; so does a flag that cannot be parsed.
Nothing here imports torch: `lowtide --help` answers at once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide import __version__
from lowtide.errors import LowtideError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """Where a command lives: `module` is imported when it is called, `attribute` is the function whose signature tyro
    reads; or, if it `parses_itself`, a function of (program name, arguments)."""

    module: str
    attribute: str
    summary: str
    parses_itself: bool = False


COMMANDS: dict[str, Command] = {
    "demo": Command("lowtide.cli.demo", "demo", "Train the same network plain and lean side by side; one HTML page."),
    "train densenet": Command("lowtide.cli.train", "densenet", "Train a DenseNet on images.", parses_itself=True),
    "train sgconv": Command(
        "lowtide.cli.train_sgconv", "sgconv", "Train a long-convolution model on sequences.", parses_itself=True
    ),
    "eval": Command("lowtide.cli.eval", "evaluate", "Error of a trained checkpoint on a data set."),
    "predict": Command("lowtide.cli.predict", "predict", "Classes of image files by a trained checkpoint."),
    "verify": Command("lowtide.cli.verify", "verify", "Is the candidate the same network as the reference?"),
    "measure": Command("lowtide.cli.measure", "measure", "Bytes kept for backward, peak memory and time of a step."),
    "plan": Command("lowtide.cli.plan", "plan", "Which memory levels fit a budget."),
    "bench": Command("lowtide.cli.bench", "bench", "Time and memory against the plain form."),
    "stream apply": Command("lowtide.cli.stream", "apply", "Run a long-convolution layer over a large file."),
    "stream pipe": Command("lowtide.cli.stream", "pipe", "Run a layer or an impulse response live, stdin to stdout."),
    "stream generate": Command("lowtide.cli.generate", "generate", "Text from a trained model, byte by byte."),
    "env": Command("lowtide.cli.env", "env", "Versions, devices and kernel providers found here."),
}


def available() -> dict[str, Command]:
    """The commands whose module is part of this installation."""
    return {name: command for name, command in COMMANDS.items() if importlib.util.find_spec(command.module)}


def find(argv: Sequence[str]) -> tuple[str, Command, list[str]] | None:
    """The command that `argv` begins with, and the arguments left over; the longest name wins."""
    commands = available()
    for n_words in (2, 1):
        name = " ".join(argv[:n_words])
        if len(argv) >= n_words and name in commands:
            return name, commands[name], list(argv[n_words:])
    return None


def help_text(prefix: str = "") -> str:
    """The list of commands, or of those that start with `prefix`."""
    rows = {name: c.summary for name, c in available().items() if not prefix or name.startswith(prefix + " ")}
    width = max(len(name) for name in rows)
    lines = [f"usage: {' '.join(['lowtide', prefix]).strip()} COMMAND [options]", ""]
    if not prefix:
        lines += ["Train the same network with the same gradients in a fraction of the peak memory, and prove it.", ""]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in rows.items()]
    lines += ["", "Each command has --help and --json; lowtide --version prints the version."]
    return "\n".join(lines)


def _call(name: str, command: Command, args: list[str]) -> object:
    function = getattr(importlib.import_module(command.module), command.attribute)
    prog = f"lowtide {name}"
    if command.parses_itself:
        return function(prog, args)
    from lowtide.cli.parsing import parse

    # parsed first, called afterwards: what the function prints must not be mixed with what the parser prints
    @functools.wraps(function)
    def record(*positional: object, **keywords: object) -> Callable[[], object]:
        return lambda: function(*positional, **keywords)

    return parse(prog, record, args)()


def run(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] == "--version":
        print(f"lowtide {__version__}")
        return 0
    groups = {name.split()[0] for name in available() if " " in name}
    if argv[0] in groups and (len(argv) == 1 or argv[1] in ("-h", "--help")):
        print(help_text(argv[0]))
        return 0
    try:
        found = find(argv)
        if found is None:
            words = " ".join(argv[:2] if argv[0] in groups else argv[:1])
            raise LowtideError(f"lowtide: expected a command ({', '.join(available())}), got {words!r}")
        name, command, rest = found
        result = _call(name, command, rest)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except LowtideError as error:
        print(" ".join(f"error: {error}".splitlines()), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output left (`| head`): nothing more can be said, and the interpreter must not try at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `lowtide` and `python -m lowtide`."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))
