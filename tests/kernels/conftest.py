"""The provider that a case runs on: each in turn."""

from __future__ import annotations

import pytest
from kernel_providers import PROVIDERS, make

from lowtide.kernels import Kernels


@pytest.fixture(params=PROVIDERS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return make(request.param)
