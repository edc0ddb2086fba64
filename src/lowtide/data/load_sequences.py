"""From a data set's name to its three parts: `load_sequences`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F

from lowtide.data.image_readers import IMAGE_SPECS
from lowtide.data.images import ImageArray, hold_out, pixel_statistics
from lowtide.data.listops import VOCABULARY, ListOpsRules
from lowtide.data.listops_cache import load_listops
from lowtide.data.npz import read_npz
from lowtide.data.seeds import derive_seed
from lowtide.data.sequences import PixelRows, SequenceBatches, SequenceData, SequenceFormat, SequenceSource
from lowtide.data.text import TEXT, load_text
from lowtide.errors import ArgumentError, DataError, describe

NPZ = "npz:"
LISTOPS = "listops"
# the side to which pictures are reduced when none is asked for: their own
OWN_SIDE = {"digits": 8, "fashion-mnist": 28, "cifar10": 32}
NPZ_TEST_FRACTION = 0.1


def load_sequences(
    name: str,
    *,
    root: Path | None = None,
    download: bool = False,
    validation: float = 0.1,
    limit_train: int | None = None,
    limit_test: int | None = None,
    side: int | None = None,
    listops: ListOpsRules | None = None,
    text_length: int = 512,
    seed: int = 0,
    statistics: tuple[float, float] | None = None,
) -> SequenceData:
    """Read a data set and split it.

    Args:
        name: digits, fashion-mnist or cifar10 (grey pixels, row by row), listops, npz:PATH, or text:PATH (bytes).
        root: folder of the files; None looks in ./data.
        download: fetch missing pictures through torchvision, where it can.
        validation: fraction of the training rows that is held out, drawn by `seed`. ListOps has validation trees; a
            text's validation part is a piece of the file.
        limit_train, limit_test: use that many training rows (the first test rows) only.
        side: of the pictures, reduced by averaging: side^2 positions. None: their own (8, 28, 32).
        listops: which trees; None: the published limits and counts.
        text_length: bytes in a row of a text.
        seed: fixes the split.
        statistics: mean and deviation of the pixels, those that a trained network is used to; None takes them from the
            training part.

    Raises:
        DataError: files are missing, damaged, or hold other things than they should.
        ArgumentError: an unknown name or an option out of range.
    """
    for option, limit in (("--limit-train", limit_train), ("--limit-test", limit_test)):
        if limit is not None and limit < 1:
            raise ArgumentError(describe(expected="at least 1", got=limit, where=option))
    if name in OWN_SIDE:
        train, test = (_grey(part, name, side) for part in IMAGE_SPECS[name].read(root, download))
        rows, held_out = hold_out(len(train.labels), validation, limit_train, seed)
        if statistics is None:
            (mean,), (std,) = pixel_statistics(train, rows)
            statistics = mean, std
        sources = [PixelRows(p.images.flatten(1), p.labels, *statistics) for p in (train, test)]
        form = SequenceFormat(1, None, train.images[0].numel(), *statistics)
        return _data(
            name, IMAGE_SPECS[name].classes, form, (sources[0], rows), (sources[0], held_out), sources[1], limit_test
        )
    if name == LISTOPS:
        rules = listops or ListOpsRules()
        train, held, test = load_listops(rules, root)
        rows = torch.arange(rules.n_train)[:limit_train]
        form = SequenceFormat(1, len(VOCABULARY), rules.longer - 1)
        classes = tuple("0123456789")
        return _data(name, classes, form, (train, rows), (held, torch.arange(rules.n_validation)), test, limit_test)
    if name.startswith(NPZ):
        return _npz(name, validation, limit_train, limit_test, seed)
    if name.startswith(TEXT):
        return load_text(
            name, length=text_length, validation=validation, limit_train=limit_train, limit_test=limit_test, seed=seed
        )
    expected = f"one of {', '.join((*OWN_SIDE, LISTOPS, NPZ + 'PATH', TEXT + 'PATH'))}"
    raise ArgumentError(describe(expected=expected, got=repr(name), where="--data"))


def _data(
    name: str,
    classes: tuple[str, ...],
    form: SequenceFormat,
    train: tuple[SequenceSource, torch.Tensor],
    validation: tuple[SequenceSource, torch.Tensor],
    test: SequenceSource,
    limit_test: int | None,
    test_rows: torch.Tensor | None = None,
) -> SequenceData:
    test_rows = torch.arange(len(test.labels)) if test_rows is None else test_rows
    return SequenceData(
        name,
        classes,
        form,
        SequenceBatches(*train),
        SequenceBatches(*validation) if len(validation[1]) else None,
        SequenceBatches(test, test_rows[:limit_test]),
    )


def _npz(name: str, validation: float, limit_train: int | None, limit_test: int | None, seed: int) -> SequenceData:
    found = read_npz(Path(name.removeprefix(NPZ)))
    source = found.rows
    n = len(source.labels)
    if found.test is None:
        rest, test_rows = hold_out(n, NPZ_TEST_FRACTION, None, derive_seed(seed, "test part"))
        test = source
    else:
        rest, test_rows = torch.arange(n), torch.arange(len(found.test.labels))
        test = found.test
    if not len(test_rows):
        fix = "add x_test and y_test, or more rows"
        raise DataError(describe(expected="rows for a test part", got=f"{n} rows", where=name, fix=fix))
    train, held_out = hold_out(len(rest), validation, limit_train, seed)
    form = SequenceFormat(1 if source.x.dim() == 2 else source.x.shape[2], found.vocabulary, source.x.shape[1])
    classes = tuple(f"class {i}" for i in range(found.n_classes))
    return _data(name, classes, form, (source, rest[train]), (source, rest[held_out]), test, limit_test, test_rows)


def _grey(pictures: ImageArray, name: str, side: int | None) -> ImageArray:
    """(N, 1, side, side): colours weighted as the eye does (ITU-R BT.601), then reduced by averaging."""
    images = pictures.images
    own = images.shape[-1]
    side = OWN_SIDE[name] if side is None else side
    if not 1 <= side <= own:
        raise ArgumentError(describe(expected=f"1..{own} for {name}", got=side, where="--image-side"))
    if images.shape[1] == 1 and side == own:
        return pictures
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    parts = []
    for some in images.split(4096):
        pixels = some.to(torch.float32)
        grey = pixels if pixels.shape[1] == 1 else (pixels * weights).sum(1, keepdim=True)
        parts.append(F.adaptive_avg_pool2d(grey, side).round_().clamp_(0, 255).to(torch.uint8))
    return ImageArray(torch.cat(parts), pictures.labels)
