"""Fetch the files of a data set: checked against their sha256, and either there complete or not there at all."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_train.errors import DataError

_TIMEOUT_S = 5.0  # for each address of a host
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file on the internet whose content is known."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def ensure(files: Sequence[RemoteFile], folder: Path) -> None:
    """Download into `folder` those of `files` that are not there yet.

    Raises:
        DataError: it failed; says which files to put where by hand.
    """
    _fetch_missing([(file, folder / file.name) for file in files], folder, fetch=lambda file, path: download(file.url, path, file.sha256))


def ensure_unpacked(archive: RemoteFile, folder: Path, *, member: str) -> None:
    """Download a tar archive and put its folder `member` into `folder`, unless it is there."""
    _fetch_missing([(archive, folder / member)], folder, fetch=_download_and_unpack)


def download(url: str, path: Path, sha256: str) -> None:
    """Download `url` to `path`, which appears complete and verified or not at all.

    Raises:
        DataError: no connection, a refusal, other content than expected, or a full disk.
    """
    # Not mkstemp: its files are readable by their owner alone, and data folders are shared.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            _log.info("downloading %s to %s", url, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "xb") as file:
                while chunk := response.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        if digest.hexdigest() != sha256:
            happened = f"{url} gives other content: its sha256 is {digest.hexdigest()}"
            raise DataError(key="data.root", happened=happened, expected=f"sha256 {sha256}")
        os.replace(part, path)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise DataError(key="data.root", happened=f"{url} answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(key="data.root", happened=f"{url} cannot be downloaded: {_reason(error)}") from error
    finally:
        with suppress(OSError):  # it may never have come to be
            part.unlink()


def _fetch_missing(targets: list[tuple[RemoteFile, Path]], folder: Path, *, fetch: Callable[[RemoteFile, Path], None]) -> None:
    missing = [(file, path) for file, path in targets if not path.exists()]
    if not missing:
        return
    try:
        for file, path in missing:
            if not path.exists():  # another process may just have fetched it; files appear by renaming
                fetch(file, path)
    except DataError as error:
        names = ", ".join(path.name for _, path in missing)
        raise DataError(
            key="data.root",
            happened=f"{folder.absolute()} lacks {names}, and {error.happened}",
            expected=error.expected,
            fix=f"put into {folder.absolute()}: " + ", ".join(file.url for file, _ in missing),
        ) from error


def _download_and_unpack(archive: RemoteFile, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        download(archive.url, scratch / archive.name, archive.sha256)
        with tarfile.open(scratch / archive.name) as tar:
            # No links, no devices; "data" refuses paths that lead outside.
            tar.extractall(scratch, members=(member for member in tar if member.isfile()), filter="data")
        (scratch / target.name).rename(target)
    except (OSError, tarfile.TarError) as error:
        if not target.is_dir():  # else another machine was faster
            raise DataError(key="data.root", happened=f"{archive.url} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)  # a URLError wraps it
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
    return str(cause) or type(cause).__name__
