"""Shared set-up: which lowtide is under test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import lowtide


def pytest_sessionstart(session: pytest.Session) -> None:
    expected = os.environ.get("LOWTIDE_EXPECT_ROOT")
    if expected and not Path(lowtide.__file__).is_relative_to(expected):
        pytest.exit(f"the wheel in {expected} is to be tested, but lowtide came from {lowtide.__file__}", returncode=3)
