"""Unpacking a tar file of unknown origin: plain files, folders, and links, nothing outside the folder."""

import gzip
import posixpath
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from ddp_train.errors import DataError

_MAX_MEMBERS, _MAX_BYTES = 200_000, 2 << 30


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar.gz. Raises DataError: it is damaged, or a member is not what it may be; then nothing is unpacked."""
    members, size = list[tarfile.TarInfo](), 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                members.append(member)
                size += member.size
                if len(members) > _MAX_MEMBERS or size > _MAX_BYTES:
                    raise tarfile.TarError(f"more than {_MAX_MEMBERS:,} files, or 2 GiB")
            links = {member.name for member in members if member.issym()}
            if wrong := next((member.name for member in members if not _is_harmless(member, links)), ""):
                raise tarfile.TarError(f"{wrong!r} leads out of the folder, or is no plain file")
            tar.extractall(into, members, filter="data")  # which checks once more
    except (tarfile.TarError, EOFError, zlib.error, ValueError, gzip.BadGzipFile, FileNotFoundError) as error:
        happened, expected = f"{archive} is not used: {error}", "what `ddp-train reproduce RUN --export=FILE` has written"
        raise DataError(happened=happened, expected=expected) from None


def _is_harmless(member: tarfile.TarInfo, links: set[str]) -> bool:
    """Tell whether a member stays inside. Links in the middle of a path are refused: what `..` means after them is not what it says."""
    parents = {str(parent) for parent in PurePosixPath(member.name).parents}
    target = posixpath.join(posixpath.dirname(member.name), member.linkname)
    names = [member.name, *([target] if member.issym() else [])]
    is_inside = all(posixpath.normpath(name).partition("/")[0] not in ("", "..") for name in names)
    is_plain = all(posixpath.normpath(name) == name for name in (member.name, *([member.linkname] if member.issym() else [])))
    return is_inside and is_plain and links.isdisjoint(parents) and (member.isreg() or member.isdir() or member.issym())
