"""The idx format (MNIST and its kin): two zero bytes, a type byte, the number of axes, the axes as big-endian int32,
then the data.

Files may be gzip-compressed; that is told from their first bytes, not from their name.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import DataError, describe

UNSIGNED_BYTE = 0x08
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, n_axes: int) -> Tensor:
    """A uint8 tensor with `n_axes` axes.

    Raises:
        DataError: the file is missing, truncated, too long, or not an idx file of unsigned bytes with that many axes.
    """
    content = _read(path)
    header = 4 + 4 * n_axes
    magic = bytes([0, 0, UNSIGNED_BYTE, n_axes])
    if content[:4] != magic:
        got = f"{bytes(content[:4]).hex(' ')}" if content else "an empty file"
        raise DataError(
            describe(
                expected=f"an idx file of bytes with {n_axes} axes (begins {magic.hex(' ')})", got=got, where=str(path)
            )
        )
    if len(content) < header:
        raise DataError(describe(expected=f"a header of {header} bytes", got=f"{len(content)} bytes", where=str(path)))
    shape = struct.unpack_from(f">{n_axes}i", content, 4)
    if min(shape) < 1:
        raise DataError(describe(expected="positive sizes in the header", got=str(shape), where=str(path)))
    if len(content) != header + math.prod(shape):
        raise DataError(
            describe(
                expected=f"{header + math.prod(shape)} bytes for shape {'x'.join(map(str, shape))}",
                got=f"{len(content)} bytes",
                where=str(path),
                fix="the file is truncated or damaged: fetch it again",
            )
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape))


def _read(path: Path) -> bytearray:
    # a bytearray, because a tensor over read-only bytes would be a trap
    try:
        content = bytearray(path.read_bytes())
        if content[:2] == GZIP_MAGIC:
            content = bytearray(gzip.decompress(content))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            describe(
                expected="a whole gzip file",
                got=f"{path.stat().st_size} bytes ({error})",
                where=str(path),
                fix="the file is truncated or damaged: fetch it again",
            )
        ) from None
    except OSError as error:
        raise DataError(describe(expected="a readable file", got=error.strerror, where=str(path))) from None
    return content
