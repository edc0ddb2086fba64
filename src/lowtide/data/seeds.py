"""One seed, many independent streams: split, weights, order, augmentation.

A stream is named, so adding one leaves the numbers of all others as they were; and a number depends on its name alone,
never on how many were drawn before it: that is what makes a resumed run, or one with other worker processes, bit for
bit the same.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *stream: str | int) -> int:
    """A 63-bit seed for the stream called `stream` (names and numbers such as an epoch and a sample's index).

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1)
    True
    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 2)
    False
    """
    digest = hashlib.blake2b(repr((seed, *stream)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *stream: str | int) -> torch.Generator:
    """A CPU generator of its own for a stream; the global generator is not touched."""
    return torch.Generator().manual_seed(derive_seed(seed, *stream))
