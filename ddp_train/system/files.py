"""Files that are written whole or not at all, and files that grow line by line."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ddp_train.errors import DataError
from ddp_train.system.redaction import redact, redact_all


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically, without secrets. A link at this path is replaced, not followed."""
    with _temporary_file(path, text) as temporary:
        os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, _json(content))


def create_json(path: Path, content: Mapping[str, Any]) -> bool:
    """Write one JSON object unless the file exists; tell whether it was written. Of many ranks and threads exactly one succeeds."""
    with _temporary_file(path, _json(content)) as temporary:
        try:
            os.link(temporary, path)  # unlike rename, link refuses to replace
        except FileExistsError:
            return False
    return True


def earlier_copy(path: Path) -> Path:
    """Return the next free name for what lies at a path and makes way: NAME.1.SUFFIX, NAME.2.SUFFIX, ..."""
    number = sum(1 for _ in path.parent.glob(f"{path.stem}.[0-9]*{path.suffix}")) + 1
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote. DataError: it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        happened, fix = f"{path} cannot be read: {error}", "restore it, or move it away"
        raise DataError(happened=happened, expected="an unchanged file", fix=fix) from None


def tail(path: Path, max_bytes: int) -> str:
    """Return at most the last `max_bytes` of a text file; "": it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def json_lines(path: Path, *, last_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, but for lines that are cut off; nothing if it cannot be read.

    `last_bytes`: of the end of the file alone; 0: all of it.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        if last_bytes:
            file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        yield from filter(None, map(json_object, file))


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the object in a line of JSON; None: it is cut off, or holds something else."""
    try:  # `suppress` takes a third as long as to parse a line
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def refresh(folder: Path) -> None:
    """Let NFS ask its server what is in a folder (close-to-open): else what was missing there is so for a minute. OSError: no folder."""
    os.listdir(folder)


@contextlib.contextmanager
def appears_whole(path: Path, *, nonce: str = "") -> Iterator[Path]:
    """Yield a path for a file or a folder, and rename it to `path` when the block ends; after an error nothing of it is left.

    Without a nonce it removes what a killed process has left; with one of its own each process can write the same file at once.
    """
    partial = path.with_name(f".partial_{path.name}{nonce}")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, where there is one."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class GrowingFile:
    """Appends lines to a file, at once or as soon as there is space again; while the disk is full they wait in memory.

    `path`: an existing file is continued, without the lines that `keeps` refuses.
    """

    def __init__(self, path: Path, *, keeps: Callable[[str], bool]) -> None:
        self._path, self._keeps = path, keeps
        self._file: BinaryIO | None = None
        self._waiting = b""
        self._is_late = False
        self._write_waiting()

    def append(self, line: str) -> None:
        self._waiting += f"{line}\n".encode()
        self._write_waiting()

    def close(self) -> None:
        """Close the file. OSError: lines are waiting, and there is no space for them still."""
        self._flush().close()

    def _write_waiting(self) -> None:
        try:
            self._flush()
        except OSError as error:
            if not self._is_late:
                print(f"{self._path.name} cannot be written ({error.strerror}); training continues, its lines wait in memory", flush=True)
            self._is_late = True
        else:
            if self._is_late:
                print(f"{self._path.name} is complete again", flush=True)
            self._is_late = False

    def _flush(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open()
        while self._waiting:
            written = os.write(self._file.fileno(), self._waiting)  # only a part where little space is left
            self._waiting = self._waiting[written:]
        return self._file

    def _open(self) -> BinaryIO:
        text = self._path.read_text() if self._path.exists() else ""
        if (kept := "".join(f"{line}\n" for line in text.splitlines() if self._keeps(line))) != text:
            write_atomic(self._path, kept)
        return self._path.open("ab", buffering=0)


@contextlib.contextmanager
def _temporary_file(path: Path, text: str) -> Iterator[Path]:
    """Yield a new file with the text in the folder of `path`; it is removed afterwards."""
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
