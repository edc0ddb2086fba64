"""The provider that a case runs on: each in turn."""

from __future__ import annotations

import pytest
from kernel_providers import PROVIDERS, make_native

from lowtide.kernels import Kernels, TensorCalls


@pytest.fixture(params=PROVIDERS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    provider = request.param
    return TensorCalls() if provider == "tensor" else make_native(provider.removeprefix("native-"))
