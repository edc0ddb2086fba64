"""`lowtide demo`: the same network trained plain and lean, side by side, and one HTML page."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lowtide.data.extras import import_extra
from lowtide.levels import Level
from lowtide.train.demo import compare
from lowtide.train.demo_page import Row, agreement_rows, cost_rows, save_page, training_rows
from lowtide.train.densenet import DenseNetOptions
from lowtide.train.files import make_folder
from lowtide.train.report import NoteReporter, Reporter


def demo(
    *,
    out: Path = Path("demo"),
    recompute: Level = "pointwise",
    depth: int = 40,
    growth_rate: int = 12,
    epochs: int = 3,
    limit_train: int | None = None,
    limit_test: int | None = None,
    published_depth: int = 100,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Train the same DenseNet plain and lean from one seed on embedded pictures; compare loss, error, memory and time.

    Takes under three minutes on two cores and needs no network. Writes index.html and figures.json.

    Args:
        out: Folder of the page and the figures; earlier ones there are replaced.
        recompute: Memory level of the lean network.
        depth: Layers of the network that is trained.
        growth_rate: Channels that each layer adds.
        epochs: Passes over the training pictures.
        limit_train: Train on so many pictures only.
        limit_test: Test on so many pictures only.
        published_depth: Layers of the network of which one step is measured, plain and lean.
        seed: Fixes split, weights, order and augmentation.
        json: Print the figures as JSON, and no progress.
    """
    import_extra("matplotlib", "matplotlib", "plots")  # not after minutes of training
    options = DenseNetOptions(
        depth=depth,
        growth_rate=growth_rate,
        epochs=epochs,
        limit_train=limit_train,
        limit_test=limit_test,
        recompute=recompute,
        seed=seed,
        # found by trial to learn the digits best in so few steps
        batch_size=32,
        lr=0.2,
        augment="none",
    )
    make_folder(out)
    result = compare(options, published_depth, Reporter() if json else NoteReporter())
    save_page(result, out / "index.html")
    (out / "figures.json").write_text(result.to_json() + "\n")
    if json:
        print(result.to_json())
        return
    console = Console(highlight=False)
    for rows in (training_rows(result), agreement_rows(result), cost_rows(result)):
        console.print(_table(rows))
    console.print(f"page: {out / 'index.html'}", soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    table = Table(*rows[0], box=box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        column.justify = "left" if i == 0 else "right"
    for row in rows[1:]:
        table.add_row(*row)
    return table
