"""What people read: the table, JSON, the plot, the page, and `lowtide measure`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.cli import run
from lowtide.errors import ArgumentError, MissingDependencyError
from lowtide.measure import Measurement, format_bytes, measure, time_interleaved
from lowtide.measure.html import html_page, save_html
from lowtide.measure.timeline import save_plot
from lowtide.measure.timing import Timing
from lowtide.measure.units import format_count, format_seconds

FACTORY = """
import torch
from torch import nn

def tanh():
    return nn.Tanh()

def with_inputs():
    return nn.Tanh(), torch.randn(1000, requires_grad=True)

def number():
    return 3
"""


@pytest.fixture(scope="module")
def measured() -> Measurement:
    net = nn.Sequential(nn.Linear(100, 1000), nn.Tanh())
    return measure(net, torch.randn(64, 100), repeats=2, operators=True)


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "user_models.py"
    path.write_text(FACTORY)
    return str(path)


def test_table(measured: Measurement) -> None:
    text = str(measured)
    image, map_ = 64 * 100 * 4, 64 * 1000 * 4
    assert f"kept for backward    {format_bytes(image + map_):>10}" in text
    assert f"{format_bytes(map_):>10}  1  aten::tanh  (64, 1000) float32" in text
    assert f"{format_bytes(image):>10}  0  (64, 100) float32  [input]" in text
    assert "FLOPs: forward 12.8 M, backward 12.8 M" in text  # the input asks for no gradient


def test_json_has_every_field(measured: Measurement) -> None:
    fields = json.loads(measured.to_json())
    assert fields["saved_bytes"] == 64 * 100 * 4 + 64 * 1000 * 4
    assert fields["seconds"] == measured.seconds == fields["times"][0]
    assert fields["holders"][0]["operator"] == "aten::tanh"
    assert fields["operators"]["forward_flops"] == 2 * 64 * 100 * 1000
    missing = set(Measurement.__dataclass_fields__) - set(fields) - {"timing"}
    assert not missing


def test_page_needs_no_other_file(measured: Measurement, tmp_path: Path) -> None:
    save_html(measured, "Two <layers>", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert "Two &lt;layers&gt;" in page
    assert "<svg" in page
    assert f"peak {format_bytes(measured.peak_bytes)}" in page
    assert "aten::tanh" in page
    assert "<td>250.0 KiB</td><td>1</td><td>aten::tanh</td><td>(64, 1000) torch.float32</td><td>made</td>" in page
    for outside in ("src=", "<link", "@import", "<script"):
        assert outside not in page
    assert page == html_page(measured, "Two <layers>") or "<dc:date>" in page  # the drawing carries its date


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot_files(measured: Measurement, tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"plot{suffix}"
    save_plot(measured, path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_plot_marks_the_peak_and_names_its_holders(measured: Measurement, tmp_path: Path) -> None:
    from lowtide.measure.timeline import timeline_figure

    axes = timeline_figure(measured).axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert f"peak {format_bytes(measured.peak_bytes)}" in labels
    marked = axes.lines[labels.index(f"peak {format_bytes(measured.peak_bytes)}")]
    assert marked.get_ydata()[0] == measured.peak_bytes / 2**20
    largest = measured.peak_holders[0]
    assert f"{largest.module} {largest.operator}" in axes.get_title(loc="left")


def test_bad_paths(measured: Measurement, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"plot: expected a file name in .png, .svg, .pdf, got plot.txt"):
        save_plot(measured, Path("plot.txt"))
    writers = {"x.svg": lambda p: save_plot(measured, p), "x.html": lambda p: save_html(measured, "t", p)}
    for name, save in writers.items():
        with pytest.raises(ArgumentError, match="expected an existing folder"):
            save(tmp_path / "absent" / name)


def test_without_matplotlib(measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "lowtide\[plots\]"'):
        save_html(measured, "t", tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_percentiles() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0, 6.0))
    assert (timing.p20, timing.median, timing.p80) == (2.0, 3.5, 5.0)


def test_interleaved_takes_turns() -> None:
    order: list[str] = []
    timings = time_interleaved([lambda: order.append("a"), lambda: order.append("b")], repeats=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert [len(t.times) for t in timings] == [3, 3]


def test_units() -> None:
    assert [format_bytes(b) for b in (0, 1023, 1024, 2**20 - 1, 5 * 2**30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 GiB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (2e-6, 0.5, 3.0)] == ["2 us", "500 ms", "3 s"]
    assert [format_count(c) for c in (7, 2e4, 3e7, 4e9, 5e12)] == ["7", "20 k", "30 M", "4 G", "5 T"]


def test_command_prints_a_table(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", f"{factory}:with_inputs", "--repeats", "2", "--operators"]) == 0
    out = capsys.readouterr().out
    assert f"kept for backward    {format_bytes(4000):>10}" in out
    assert "ran again in backward: 0 operators" in out


def test_command_json_html_and_plot(factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, plot = tmp_path / "page.html", tmp_path / "plot.png"
    arguments = ["measure", f"{factory}:tanh", "--input", "10x100", "--repeats", "1", "--json"]
    assert run([*arguments, "--html", str(page), "--plot", str(plot)]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["repeats"] == 1
    assert fields["peak_bytes"] == 4000  # no parameter and no input asks for a gradient: the result alone
    assert page.stat().st_size > 0
    assert plot.stat().st_size > 0


def test_command_sets_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {}
    for level in ("none", "layer"):
        flags = ["--input", "2x3x16x16", "--repeats", "1", "--json", "--recompute", level]
        assert run(["measure", "lowtide:densenet_bc-40-12", *flags]) == 0
        kept[level] = json.loads(capsys.readouterr().out)["saved_bytes"]
    assert kept["layer"] < kept["none"] / 4


def test_command_in_fresh_processes(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", f"{factory}:with_inputs", "--repeats", "1", "--process", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["process"]
    assert figures["peak_bytes"] == 3 * 4000  # the result, its gradient, the gradient of the input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:tanh"], "expected inputs, got none; give --input 8x3x32x32, or let the factory return"),
        (["{}:tanh", "--input", "8x3y"], "--input: expected sizes joined by x, such as 8x3x32x32, got '8x3y'"),
        (["{}:tanh", "--input", "8", "--recompute", "layer"], "--recompute: expected a model with set_recompute"),
        (["{}:number", "--input", "8"], "expected the factory to return a module or (module, inputs), got int"),
        (["{}:absent", "--input", "8"], "expected a name defined in"),
        (["absent.py:tanh", "--input", "8"], "expected an existing file, got absent.py"),
        (["tanh", "--input", "8"], "target: expected module:name or file.py:name, got 'tanh'"),
        (["torchvision:resnet0", "--input", "8"], "expected a model of torchvision.models.list_models()"),
        (["lowtide:resnet18", "--input", "8"], "(lowtide verify --list names them), got 'resnet18'"),
        (["{}:tanh", "--input", "8", "--repeats", "0"], "expected repeats to be an integer >= 1, got 0"),
        (["{}:tanh", "--input", "8", "--device", "gpu"], "expected a device such as 'cpu' or 'cuda:0', got 'gpu'"),
        (["{}:tanh", "--input", "8", "--html", "absent/page.html"], "--html: expected an existing folder, got absent"),
        (["{}:tanh", "--input", "8", "--plot", "plot.gif"], "--plot: expected a file name in .png, .svg, .pdf, got"),
    ],
)
def test_command_errors_are_one_line(
    arguments: list[str], message: str, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["measure", *(a.format(factory) for a in arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert message in streams.err
    assert streams.err.count("\n") == 1
