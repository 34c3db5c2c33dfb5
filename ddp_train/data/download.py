"""Fetch the files of a data set: checked against their sha256, and either there complete or not there at all."""

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ddp_train.errors import DataError
from ddp_train.system.files import appears_whole

_TIMEOUT_S = 5.0  # for each address of a host
_log = logging.getLogger(__name__)


def ensure(sha256: Mapping[str, str], address: str, folder: Path) -> None:
    """Download from `address` into `folder` those files that are not there yet; `sha256` has them by name.

    Raises DataError: it failed; says which files to put where by hand.
    """
    missing = [name for name in sha256 if not (folder / name).exists()]
    with _or_by_hand(folder, {name: f"{address}{name}" for name in missing}):
        for name in missing:
            download(f"{address}{name}", folder / name, sha256[name])


def ensure_unpacked(url: str, sha256: str, folder: Path, *, member: str) -> None:
    """Download a tar archive and put its folder `member` into `folder`, unless it is there."""
    target, scratch = folder / member, folder / f".{member}.{uuid.uuid4().hex}.part"
    if target.exists():
        return
    with _or_by_hand(folder, {member: url}):
        try:
            download(url, scratch / "archive", sha256)
            with tarfile.open(scratch / "archive") as tar:
                # No links, no devices; "data" refuses paths that lead outside.
                tar.extractall(scratch, members=(entry for entry in tar if entry.isfile()), filter="data")
            (scratch / member).rename(target)
        except (OSError, tarfile.TarError) as error:
            if not target.is_dir():  # else another machine was faster
                raise DataError(key="data.root", happened=f"{url} cannot be unpacked: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def download(url: str, path: Path, sha256: str) -> None:
    """Download `url` to `path`, which appears complete and verified or not at all.

    Raises DataError: no connection, a refusal, other content than expected, or a full disk.
    """
    try:
        # Not mkstemp: its files are readable by their owner alone, and data folders are shared.
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, appears_whole(path, nonce=uuid.uuid4().hex) as partial:
            _log.info("downloading %s to %s", url, path)
            with open(partial, "xb+") as file:
                shutil.copyfileobj(response, file)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                happened = f"{url} has different content: its sha256 is {found}"
                raise DataError(key="data.root", happened=happened, expected=f"sha256 {sha256}")
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise DataError(key="data.root", happened=f"{url} cannot be downloaded: {error}") from error


def damaged(path: Path, what: str, expected: str) -> DataError:
    """Return the error for a file that is not what was published."""
    return DataError(key="data.root", happened=f"{path} {what}", expected=expected, fix=f"delete {path} and fetch it again")


@contextmanager
def _or_by_hand(folder: Path, urls: Mapping[str, str]) -> Iterator[None]:
    """Add to the error of a download which files are missing, and how to get them by hand: `urls`, by file."""
    try:
        yield
    except DataError as error:
        happened = f"{folder.absolute()} lacks {', '.join(urls)}, and {error.happened}"
        fix = f"put into {folder.absolute()}: {', '.join(urls.values())}"
        raise DataError(key="data.root", happened=happened, expected=error.expected, fix=fix) from error
