"""The demo at a small size: its figures hang together, and its page needs nothing but itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide import cli
from lowtide.train.demo import FIRST_STEPS, build_step, largest_difference

SMALL = [
    *("demo", "--epochs", "1", "--depth", "10", "--growth-rate", "4", "--published-depth", "16"),
    *("--limit-train", "320", "--limit-test", "40"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert cli.run([*SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def figures(demo: Path) -> dict[str, Any]:
    return json.loads((demo / "figures.json").read_text())


def test_plain_and_lean_agree_in_float64_and_the_curves_are_not_trivial(figures: dict[str, Any]) -> None:
    assert figures["differences"]["float64"] < 1e-10
    for name in ("plain", "lean", "other_layout", "plain_float64", "lean_float64"):
        losses = figures[name]["losses"]
        assert len(losses) == (FIRST_STEPS if "float64" in name else 10)
        assert len(set(losses)) == len(losses)
        assert 0 < min(losses) < max(losses) < 10
    # the first loss comes before any update: float32 rounding alone
    assert abs(figures["plain"]["losses"][0] - figures["lean"]["losses"][0]) < 1e-5
    assert figures["options"]["recompute"] == "pointwise"


def test_the_differences_are_those_of_the_curves(figures: dict[str, Any]) -> None:
    plain, lean = figures["plain"]["losses"], figures["lean"]["losses"]
    assert figures["differences"]["float32"] == max(abs(a - b) for a, b in zip(plain, lean, strict=True))
    assert largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.9]) == 0.5
    with pytest.raises(ValueError):
        largest_difference([1.0], [1.0, 2.0])


def test_lean_steps_take_less_memory(figures: dict[str, Any]) -> None:
    """Plain keeps, in channels of 64 x 32 x 32 floats: per layer the concatenation, its activation, two bottleneck maps
    and the new features. That of the first block alone is a lower bound."""
    none, pointwise, layer = figures["published_costs"]
    assert [cost["level"] for cost in figures["published_costs"]] == ["none", "pointwise", "layer"]
    assert layer["peak_bytes"] < pointwise["peak_bytes"] < none["peak_bytes"]
    channel, growth, layers, first = 64 * 32 * 32 * 4, 4, 2, 8
    concatenated = sum(first + i * growth for i in range(layers))
    assert none["peak_bytes"] > (2 * concatenated + layers * (2 * 4 * growth + growth)) * channel
    for cost in figures["published_costs"]:
        assert cost["seconds"] > 0
    assert figures["lean_cost"]["peak_bytes"] < figures["plain_cost"]["peak_bytes"]


def test_the_page_needs_no_other_file_and_no_network(demo: Path) -> None:
    page = (demo / "index.html").read_text()
    assert sorted(path.name for path in demo.iterdir()) == ["figures.json", "index.html"]
    assert page.count("<svg") == 2
    assert page.count("<table>") == 3
    assert not re.search(r"<script|<link|<img|<iframe|@import|\bsrc=", page)
    # references stay inside the page; the namespaces of SVG are names, not addresses that are fetched
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_the_page_shows_the_figures(demo: Path, figures: dict[str, Any]) -> None:
    page = (demo / "index.html").read_text()
    for name in ("plain", "lean", "other_layout"):
        assert f"{figures[name]['test_error_percent']:.2f} %" in page
    assert f"{figures['differences']['float64']:.1e}" in page
    assert f"{figures['differences']['float32_plain_in_another_layout']:.1e}" in page


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.run(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert "expected a folder that can be made" in capsys.readouterr().err


def test_a_step_changes_the_weights_and_makes_momentum() -> None:
    step = build_step(depth=10, growth_rate=4, level="pointwise")
    model = next(cell.cell_contents for cell in step.__closure__ or () if hasattr(cell.cell_contents, "features"))
    before = model.classifier.weight.clone()
    step()
    assert not (model.classifier.weight == before).all()
