"""Fresh processes: the exact peak lies below the process's high-water and close to it; errors are told in one line."""

from __future__ import annotations

import sys

import pytest

from lowtide.errors import ArgumentError, LowtideError, UnsupportedError
from lowtide.measure import child
from lowtide.measure.child import HighWater, run_in_child

MIB = 2**20
KERNEL = MIB  # Linux counts a process's pages in batches per core: its figures lag by some hundred KiB


@pytest.mark.parametrize(
    ("target", "kwargs", "at_least"),
    [
        # the features of one image are 30.2 MiB in the plain form, the dense blocks alone
        ("child_steps:bc_100", {"batch": 8}, 8 * 30.2 * MIB),
        # 8 of twice the length: padded inputs, spectra, padded result, the product's gradient and its two parts
        ("child_steps:fft_convolution", {"channels": 8, "length": 1 << 19}, 8 * 2 * (8 * (1 << 19) * 4)),
    ],
)
def test_peak_is_below_the_high_water_and_within_15_percent(
    target: str, kwargs: dict[str, int], at_least: float
) -> None:
    figures = run_in_child(target, kwargs, parts=("allocations", "mapped"))
    assert at_least < figures["peak_bytes"] <= figures["high_water_bytes"] <= 1.15 * figures["peak_bytes"]
    assert figures["library_scratch_bytes"] == figures["high_water_bytes"] - figures["peak_bytes"]


def test_every_figure_of_a_known_step(capfd: pytest.CaptureFixture[str]) -> None:
    numbers, times, steps = 4 * MIB, 3, 3
    figures = run_in_child("child_steps:exponentials", {"numbers": numbers, "times": times}, steps=steps)
    exact = times * numbers * 4
    assert figures["peak_bytes"] == exact
    assert figures["saved_bytes"] == figures["outside_autograd_bytes"] == 0
    for name in ("high_water_bytes", "process_high_water_bytes"):
        assert exact - KERNEL <= figures[name] <= exact + 24 * MIB
    assert figures["malloc_bytes"] == figures["process_high_water_bytes"] - figures["high_water_bytes"]
    assert len(figures["times"]) == steps
    assert min(figures["times"]) <= figures["seconds"] <= max(figures["times"])
    assert capfd.readouterr().out == "", "what the step prints goes to stderr"


def test_variables_reach_the_process() -> None:
    figures = run_in_child("child_steps:threads", env={"OMP_NUM_THREADS": "1"}, parts=["process"], steps=1)
    assert set(figures) == {"process_high_water_bytes", "seconds", "times"}


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (
            "child_steps:fails",
            LowtideError,
            r"child_steps:fails .*RuntimeError: a fault of the step \(.*steps.py:",
        ),
        ("child_steps:killed", LowtideError, "child_steps:killed: .* signal 9: killed, out of memory perhaps"),
        ("child_steps:absent", ArgumentError, "expected a name defined in child_steps, got 'absent'"),
        ("child_steps:NOT_CALLABLE", ArgumentError, "expected a function that builds the step, got int"),
        ("no_such_module:step", ArgumentError, "expected an importable module, got 'no_such_module'"),
    ],
)
def test_failures_are_told_in_one_line(target: str, error: type[LowtideError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        run_in_child(target, parts=["mapped"])
    assert "\n" not in str(caught.value)


def test_time_out() -> None:
    with pytest.raises(LowtideError, match="child_steps:sleeps: not done after 5 s"):
        run_in_child("child_steps:sleeps", parts=["mapped"], timeout_s=5)


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="expected parts among allocations, mapped, process, got"):
        run_in_child("child_steps:threads", parts=["mappped"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="expected steps to be an integer >= 1, got 0"):
        run_in_child("child_steps:threads", steps=0)
    with pytest.raises(ArgumentError, match="expected kwargs of JSON values"):
        run_in_child("child_steps:threads", {"x": object()})


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match=r"expected Linux .*, got darwin"):
        run_in_child("child_steps:threads")


def test_high_water_of_this_process() -> None:
    del_me = bytearray(128 * MIB)  # written, then given back: the process was this large once
    del del_me
    high_water = HighWater()
    assert high_water.over_base() < 32 * MIB
    held = bytearray(64 * MIB)
    assert 64 * MIB - KERNEL <= high_water.over_base() < 96 * MIB
    del held
    assert high_water.over_base() >= 64 * MIB - KERNEL, "a high-water does not fall"


def test_a_high_water_of_start_up_is_not_taken_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc/self/clear_refs cannot be written, the old high-water stays: only a larger one can be told."""
    status = {"VmRSS": 100 * MIB, "VmHWM": 102 * MIB}
    monkeypatch.setattr(child, "_status_bytes", lambda name: status[name])
    monkeypatch.setattr(child, "_reset_high_water", lambda: False)
    high_water = HighWater()
    with pytest.raises(UnsupportedError, match="measure a larger input"):
        high_water.over_base()
    status["VmHWM"] = 450 * MIB
    assert high_water.over_base() == 350 * MIB
