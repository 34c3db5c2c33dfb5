"""Files that are written whole or not at all; the end of one that grows."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_train.errors import DataError
from ddp_train.redaction import redact, redact_all


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is either all there or not there. Secrets do not get in, and a link in its place is replaced, not followed."""
    with _written_beside(path, text) as temporary:
        os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    write_atomic(path, _json(content))


def create_json(path: Path, content: Mapping[str, Any]) -> bool:
    """Write one JSON object unless the file is there; tell whether it was written. Of many ranks and threads exactly one succeeds."""
    with _written_beside(path, _json(content)) as temporary:
        try:
            os.link(temporary, path)  # unlike rename, link refuses to replace
        except FileExistsError:
            return False
    return True


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        DataError: it is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DataError(
            happened=f"{path} cannot be read: {error}", expected="the file as it was written", fix="put it back, or move it away"
        ) from None


def tail(path: Path, most: int) -> str:
    """Return the end of a text file, so many bytes at most; "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _written_beside(path: Path, text: str) -> Iterator[Path]:
    """Give a file with the text, in the folder of `path`, which nobody else has; it is gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(redact(text))
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        error.filename = error.filename or str(path)  # a write knows its descriptor alone: a full disk, `ulimit -f`
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(redact_all(content), indent=2, default=str) + "\n"
