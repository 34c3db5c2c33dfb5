"""Read IDX files, the format of MNIST: a magic number, the sizes, then the bytes. Source: http://yann.lecun.com/exdb/mnist/"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddp_train.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 0x08


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file, gzip-compressed or not (its first bytes tell, not its name).

    Raises:
        DataError: unreadable, corrupt, another format, or not exactly as long as its header says.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, f"is corrupt gzip: {error}", "a complete gzip file") from error
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}", "a readable file") from error

    magic = struct.pack(">HBB", 0, _UINT8, num_dims)
    header_length = len(magic) + 4 * num_dims
    if content[:4] != magic:
        expected = f"{magic.hex()}: IDX, unsigned bytes, {num_dims} dimension(s)"
        raise _damaged(path, f"starts with {content[:4].hex() or 'nothing'}", expected)
    if len(content) < header_length:
        raise _damaged(path, f"is truncated: {len(content)} bytes found", f"a header of {header_length} bytes")
    shape = struct.unpack(f">{num_dims}I", content[4:header_length])
    expected_length = header_length + math.prod(shape)
    if len(content) != expected_length:
        what = "is truncated" if len(content) < expected_length else "is too long"
        size = " x ".join(map(str, shape))
        raise _damaged(path, f"{what}: {len(content)} bytes found", f"{expected_length} bytes, as its header says ({size})")
    return np.frombuffer(content, np.uint8, offset=header_length).reshape(shape)


def _damaged(path: Path, what: str, expected: str) -> DataError:
    return DataError(key="data.root", happened=f"{path} {what}", expected=expected, fix=f"delete {path} and fetch it again")
