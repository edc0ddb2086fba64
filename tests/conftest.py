"""Shared set-up: which lowtide is under test; a run of everything fails if a kernel provider was left out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import lowtide
from exercised import has_compiler, levels_here, not_exercised

_passed = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    expected = os.environ.get("LOWTIDE_EXPECT_ROOT")
    if expected and not Path(lowtide.__file__).is_relative_to(expected):
        pytest.exit(f"the wheel in {expected} is to be tested, but lowtide came from {lowtide.__file__}", returncode=3)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_passed] = set()
    config.pluginmanager.register(_Record(config.stash[_passed]))


class _Record:
    def __init__(self, passed: set[str]) -> None:
        self.passed = passed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Only for a run of everything that came to its end, and with xdist only in the process that hears all workers."""
    config = session.config
    options = config.option
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (
        options.keyword or options.markexpr or options.collectonly or session.shouldstop or session.shouldfail
    )
    if not everything or hasattr(config, "workerinput"):
        return
    linux = sys.platform == "linux"
    missing = not_exercised(config.stash[_passed], compiler=has_compiler(), linux=linux, levels=levels_here())
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        for line in missing if reporter is not None else ():
            reporter.write_line(f"\nFAILED: {line}", red=True)
