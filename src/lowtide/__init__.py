"""lowtide: train the same network with the same gradients in a fraction of the peak memory, and prove it.

Importing it touches no GPU, compiles nothing and needs no optional package. `lowtide.convert`, `lowtide.verify`,
`lowtide.measure` and `lowtide.plan` are functions; other names: `from lowtide.verify import ...`.
"""

from __future__ import annotations

import importlib

from torch import distributed

from lowtide.convert import ConversionReport, convert, restore
from lowtide.errors import LowtideError
from lowtide.measure import Measurement, measure
from lowtide.plan import Plan, plan
from lowtide.verify import ParityReport, verify

__all__ = [
    "ConversionReport",
    "LowtideError",
    "Measurement",
    "ParityReport",
    "Plan",
    "__version__",
    "convert",
    "measure",
    "plan",
    "restore",
    "verify",
]
__version__ = "0.1.0"

# Its functions' default group is the one that stands when it is imported, which DistributedDataParallel does at its
# first use: the group would then live on into the interpreter's end, where a thread of gloo may abort the process.
if distributed.is_available():
    importlib.import_module("torch.distributed.nn.functional")
