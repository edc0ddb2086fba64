"""Which provider streams: the native cascade or tensor calls. Each is made to run, never skipped in silence."""

from __future__ import annotations

import pytest
import torch

from lowtide.kernels import stream as stream_kernels


@pytest.fixture(params=["native", "tensor"])
def provider(request, monkeypatch) -> str:
    monkeypatch.setenv("LOWTIDE_KERNELS", request.param)
    found = stream_kernels.select(torch.zeros(1))
    assert (found is not None) == (request.param == "native"), "the native kernels must be buildable here"
    return request.param
