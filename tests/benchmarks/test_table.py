"""The tables of the documents are what results/*.csv gives, and how they are made from rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import machine
import plots
import pytest
import table
from harness import Figure

ABOUT = {
    "at": "2026-01-02T03:04:05", "device": "a processor x2", "threads": "2", "capability": "AVX512",
    "kernels": "native", "torch": "2.14.1", "python": "3.11.7", "peers": "", "commit": "abc1234",
}  # fmt: skip
TEXT = "before\n<!-- benchmarks: densenet -->\nold\n<!-- end -->\nafter\n"


def figure(contender: str, **values: Any) -> Figure:
    return Figure("BC-100, batch 64", contender, repeats=9, **values)


PLAIN = figure(
    "plain", seconds=2.0, seconds_p20=1.9, seconds_p80=2.25, time_ratio=1.0, peak_bytes=1000 * 2**20, peak_ratio=1.0,
    allocated_bytes=800 * 2**20, allocated_ratio=1.0, kept_bytes=600 * 2**20, baseline=True,
)  # fmt: skip
LEAN = figure(
    "lowtide layer", seconds=1.0, seconds_p20=0.9, seconds_p80=1.1, time_ratio=0.5, peak_bytes=125 * 2**20,
    peak_ratio=0.125, allocated_bytes=100 * 2**20, allocated_ratio=0.125, kept_bytes=50 * 2**20,
)  # fmt: skip
PEER = figure("a peer", note="not installed (pip install peer)")


def filled(folder: Path, text: str = TEXT) -> str:
    (folder / "docs").mkdir(exist_ok=True)
    for document in (folder / "README.md", folder / "docs" / "page.md"):
        document.write_text(text)
    table.update((folder / "README.md", folder / "docs" / "page.md"), folder / "results")
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("document", table.DOCUMENTS, ids=lambda path: path.name)
def test_document_is_up_to_date(document: Path) -> None:
    assert table.BLOCK.search(document.read_text()), "no block to fill"
    assert document.read_text() == table.with_tables(document), "run python benchmarks/table.py"


def test_rows_become_a_table(tmp_path: Path) -> None:
    path = tmp_path / "results" / "densenet-x-2026-01-02.csv"
    machine.write_csv(path, [PLAIN, LEAN, PEER], ABOUT, "command")
    made = filled(tmp_path)
    assert made == (
        "before\n<!-- benchmarks: densenet -->\n\n"
        "**BC-100, batch 64**, 9 steps each in turns; a processor x2, 2 threads, torch 2.14.1, native kernels, "
        "2026-01-02, commit abc1234 ([rows](results/densenet-x-2026-01-02.csv))\n\n"
        "|  | step (20th to 80th percentile) | time | peak | allocated | kept |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| plain (baseline) | 2 s (1.9 to 2.25) | 1.00 | 1000 MiB, 1 | 800 MiB, 1 | 600 MiB |\n"
        "| lowtide layer | 1 s (0.9 to 1.1) | 0.50 | 125 MiB, 1/8.0 | 100 MiB, 1/8.0 | 50 MiB |\n"
        "| a peer | not installed (pip install peer) |  |  |  |  |\n"
        "\n<!-- end -->\nafter\n"
    )
    assert filled(tmp_path, made) == made
    nested = (tmp_path / "docs" / "page.md").read_text()
    assert nested == made.replace("](results/", "](../results/")
    assert nested != made


def test_the_newest_run_of_a_case_counts(tmp_path: Path) -> None:
    later = ABOUT | {"at": "2026-01-02T09:00:00", "commit": "later12"}
    machine.write_csv(tmp_path / "densenet-a-2026-01-02.csv", [PLAIN, LEAN], later, "command")
    machine.write_csv(tmp_path / "densenet-b-2026-01-02.csv", [PLAIN, LEAN], ABOUT, "command")
    made = table.section_text("densenet", tmp_path)
    assert "later12" in made
    assert "abc1234" not in made


def test_cases_stand_in_the_order_of_the_command(tmp_path: Path) -> None:
    for name in ("3d", "bc100", "densenet121", "whole"):
        machine.write_csv(tmp_path / f"densenet-{name}-2026-01-02.csv", [Figure(name, "ours")], ABOUT, "command")
    assert list(table.newest_cases("densenet", tmp_path)) == ["bc100", "densenet121", "3d", "whole"]


def test_a_changed_number_is_seen(tmp_path: Path) -> None:
    machine.write_csv(tmp_path / "results" / "densenet-x-2026-01-02.csv", [PLAIN, LEAN], ABOUT, "command")
    good, readme = filled(tmp_path), tmp_path / "README.md"
    assert good == table.with_tables(readme, tmp_path / "results")
    readme.write_text(good.replace("125 MiB", "124 MiB"))
    assert readme.read_text() != table.with_tables(readme, tmp_path / "results")


def test_rows_of_other_scripts_are_no_cases(tmp_path: Path) -> None:
    machine.write_csv(tmp_path / "densenet-x-2026-01-02.csv", [PLAIN, LEAN], ABOUT, "command")
    (tmp_path / "densenet-parity-x.csv").write_text("network,layer\na,1e-3\n")
    assert list(table.newest_cases("densenet", tmp_path)) == ["BC-100, batch 64"]


def test_nothing_measured_yet(tmp_path: Path) -> None:
    assert table.section_text("sgconv", tmp_path) == "\nNothing measured yet: `python benchmarks/run.py sgconv`.\n\n"


def test_tokens_have_times_of_their_own(tmp_path: Path) -> None:
    columns = ["case", "contender", "median_seconds", "p99_seconds", "worst_seconds", "mean_seconds", "state_bytes"]
    values = ["token", "lowtide", 4.81e-5, 9.65e-5, 2.45e-3, 4.99e-5, 3 * 2**20]
    row = dict(zip(columns, values, strict=True)) | {"direct_ratio": 2283.4} | ABOUT
    with (tmp_path / "stream-x.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    made = table.section_text("stream", tmp_path)
    assert "| lowtide | 48.1 us | 96.5 us | 2.45 ms | 49.9 us | 2.28e+03 | 3.0 MiB |" in made


@pytest.mark.parametrize(("ratio", "text"), [(1.0, "1"), (0.25, "1/4.0"), (1.24, "1.24"), (float("nan"), "-")])
def test_share(ratio: float, text: str) -> None:
    assert table.share(ratio) == text


def test_the_drawing_was_made_from_the_newest_rows() -> None:
    drawing = table.ROOT / "docs" / "growth.svg"
    assert plots.source(plots.newest(table.RESULTS)) in drawing.read_text(), "run python benchmarks/plots.py"
