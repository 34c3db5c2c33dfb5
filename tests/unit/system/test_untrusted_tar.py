"""A tar file of others brings plain files below the folder and nothing else, whatever it says."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.errors import DataError
from ddp_train.system import untrusted_tar
from ddp_train.system.untrusted_tar import unpack


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def write(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info in members:
            info.size = 3 if info.isreg() else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    return path


def test_files_folders_and_links_inside_come_out(tmp_path: Path) -> None:
    script = member("code/run.sh")
    script.mode = 0o4777
    archive = write(tmp_path / "a.tar.gz", member("code", tarfile.DIRTYPE), script, member("code/sub/link", tarfile.SYMTYPE, "../run.sh"))
    unpack(archive, tmp_path / "into")
    assert (tmp_path / "into/code/sub/link").read_text() == "abc"
    assert (tmp_path / "into/code/run.sh").stat().st_mode & 0o7777 & ~0o755 == 0  # executable, neither setuid nor writable by others


EVIL: dict[str, Callable[[], list[tarfile.TarInfo]]] = {
    "up": lambda: [member("../out")],
    "up within": lambda: [member("a/../../out")],
    "absolute": lambda: [member("/tmp/out")],
    "not normal": lambda: [member("a//b")],
    "link out": lambda: [member("a", tarfile.SYMTYPE, "../out")],
    "absolute link": lambda: [member("a", tarfile.SYMTYPE, "/etc/passwd")],
    "link that looks inside": lambda: [member("d/s", tarfile.SYMTYPE, ".."), member("d/x", tarfile.SYMTYPE, "s/../..")],
    "through a link": lambda: [member("a", tarfile.SYMTYPE, "b"), member("a/out")],
    "hard link": lambda: [member("a", tarfile.LNKTYPE, "/etc/passwd")],
    "device": lambda: [member("a", tarfile.CHRTYPE)],
    "pipe": lambda: [member("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("evil", EVIL)
def test_what_leads_out_or_is_no_plain_file_is_refused_and_nothing_is_unpacked(evil: str, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("good"), *EVIL[evil]())
    with pytest.raises(DataError, match="leads out of the folder, or is no plain file"):
        unpack(archive, tmp_path / "into")
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def test_a_damaged_one_and_one_that_is_too_large_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write(tmp_path / "a.tar.gz", *(member(f"a{number}") for number in range(9)))
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:60])
    (tmp_path / "text.tar.gz").write_text("hello")
    for name in ("cut", "text"):
        with pytest.raises(DataError, match=f"{name}.tar.gz is not used"):
            unpack(tmp_path / f"{name}.tar.gz", tmp_path / "into")
    monkeypatch.setattr(untrusted_tar, "_MAX_BYTES", 20)
    with pytest.raises(DataError, match="2 GiB"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "into").exists()
