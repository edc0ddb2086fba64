"""The fused passes behind the lean functions, and the choice of who computes them: `select(x)`.

Providers: `tensor_calls` (any device), `native` (C++ on the CPU, compiled on first use), `triton_passes` (CUDA, only
when `LOWTIDE_KERNELS=triton` asks for it).
"""

from __future__ import annotations

from lowtide.kernels.choice import VARIABLE, Choice, choose, select, states
from lowtide.kernels.interface import Activation, Kernels, Normed
from lowtide.kernels.native_shapes import alike, shapes_only
from lowtide.kernels.tensor_calls import TensorCalls, accumulation_dtype

__all__ = [
    "VARIABLE",
    "Activation",
    "Choice",
    "Kernels",
    "Normed",
    "TensorCalls",
    "accumulation_dtype",
    "alike",
    "choose",
    "select",
    "shapes_only",
    "states",
]
