"""`lowtide bench notebook` at a small size."""

from __future__ import annotations

import json

import pytest

from lowtide.cli import run


def test_bench_notebook_prints_memory_and_time(capsys):
    assert run(["bench", "notebook", "--features", "32", "--length", "100000", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit_bytes"] == 32 * 100_000 * 4
    # the output; then also its gradient and the input's; and the tiles: at most ten buffers of a 2 MiB tile or one row
    workspace = 10 * 2 * 2**20 / found["unit_bytes"]
    # a process's high-water has the code and library buffers of the first transform as well; plain takes some 20 units
    first_use = 16 * 2**20 / found["unit_bytes"]
    assert 1 <= found["forward"]["peak_units"] <= 1 + workspace + first_use
    assert 3 <= found["forward_backward"]["peak_units"] <= 3 + 2 * workspace + first_use
    assert found["forward_backward"]["seconds"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--limit", "much"], "size such as"), (["--features", "0"], "--features: expected at least 1")],
)
def test_bench_refuses_what_it_cannot_run(flags, message, capsys):
    assert run(["bench", "notebook", *flags]) == 2
    assert message in capsys.readouterr().err
