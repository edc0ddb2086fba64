"""`lowtide train sgconv`: flags, presets, and the saved options of a run that is resumed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.cli.parsing import parse
from lowtide.cli.train import goes_on, say, train_and_tell
from lowtide.data.text import TEXT
from lowtide.errors import ArgumentError, describe
from lowtide.train.options import check_unchanged
from lowtide.train.presets import OWN_DATA, PRESETS, TEXT_PRESET, Preset
from lowtide.train.run import Run
from lowtide.train.sgconv import KIND, SGConvOptions, run_name, train_sgconv


@dataclass(frozen=True)
class SGConvFlags(SGConvOptions):
    # the flags of the command line beside the options that make the run what it is
    __doc__ = SGConvOptions.__doc__

    preset: Preset | None = None
    """Start from a row of the Long Range Arena table, or from a text model; other flags override it (default: text for
    --data text:PATH)."""
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


def sgconv(prog: str, args: Sequence[str]) -> None:
    """Train. Flags override a preset, and must not differ from the options of a run that is resumed."""
    flags = parse(prog, SGConvFlags, args, flag_pairs=True)
    base = flags.preset or (TEXT_PRESET if flags.data.startswith(TEXT) else None)
    if base:
        # parsed again with the preset as defaults: what differs from it then was given on the command line
        flags = parse(prog, SGConvFlags, args, default=_flags(PRESETS[base]), flag_pairs=True)
    run = Run(flags.out or Path("runs") / run_name(flags))
    resume = goes_on(flags.resume, run)
    if flags.data == OWN_DATA and not resume:
        got, fix = "none; its data are not built in", "see lowtide.data.npz"
        expected = "--data npz:PATH"
        if PRESETS[flags.preset or TEXT_PRESET].pool == "none":
            expected, fix = f"--data {TEXT}PATH", "name any file"
        raise ArgumentError(describe(expected=expected, got=got, where=f"--preset {flags.preset}", fix=fix))
    options = _options(flags)
    if resume:
        saved = SGConvOptions.from_json(run.options(KIND), str(run.folder))
        if flags.preset is None:
            options = _options(parse(prog, SGConvFlags, args, default=_flags(saved), flag_pairs=True))
        elif options.epochs is None:
            options = dataclasses.replace(options, epochs=saved.epochs)
        check_unchanged(saved, options, str(run.folder))
    if flags.memory is not None:
        from lowtide.train.within import sgconv_within

        options, line = sgconv_within(options, flags.memory)
        say(line, flags.json)
    start = functools.partial(train_sgconv, options)
    samples = "bytes" if options.data.startswith(TEXT) else "rows"
    train_and_tell(prog, run, start, resume, flags.overwrite, flags.json, samples)


def _flags(options: SGConvOptions) -> SGConvFlags:
    return SGConvFlags(**{f.name: getattr(options, f.name) for f in dataclasses.fields(SGConvOptions)})


def _options(flags: SGConvFlags) -> SGConvOptions:
    return SGConvOptions(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(SGConvOptions)})
