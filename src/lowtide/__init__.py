"""lowtide: train the same network with the same gradients in a fraction of the peak memory, and prove it."""

from __future__ import annotations

__version__ = "0.1.0"
