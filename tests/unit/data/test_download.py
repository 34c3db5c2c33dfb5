import hashlib
import tarfile

import pytest

from ddp_train.data.download import download, ensure, ensure_unpacked
from ddp_train.errors import DataError
from tests.unit.data_files import serve, sha256, write_tar

CONTENT = b"some data" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def address(tmp_path):
    published = tmp_path / "published"
    published.mkdir()
    (published / "file.bin").write_bytes(CONTENT)
    with serve(published) as address:
        yield address


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def test_a_good_file_arrives_and_nothing_else(address, folder):
    download(f"{address}file.bin", folder / "file.bin", DIGEST)
    assert [path.name for path in folder.iterdir()] == ["file.bin"]
    assert (folder / "file.bin").read_bytes() == CONTENT


def test_another_content_than_expected_leaves_nothing(address, folder):
    with pytest.raises(DataError, match="0" * 64):
        download(f"{address}file.bin", folder / "file.bin", "0" * 64)
    assert list(folder.iterdir()) == []


def test_a_missing_page_leaves_nothing(address, folder):
    with pytest.raises(DataError, match="404"):
        download(f"{address}other.bin", folder / "other.bin", DIGEST)
    assert list(folder.iterdir()) == []


def test_a_connection_that_breaks_leaves_nothing(address, folder, monkeypatch):
    def broken_read(self, *args):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("http.client.HTTPResponse.read", broken_read)
    with pytest.raises(DataError, match="reset"):
        download(f"{address}file.bin", folder / "file.bin", DIGEST)
    assert list(folder.iterdir()) == []


def test_an_unwritable_folder_is_a_clear_error(address, folder):
    (folder / "a-file").write_text("")
    with pytest.raises(DataError, match=r"cannot be downloaded: .*File exists: .*a-file"):
        download(f"{address}file.bin", folder / "a-file" / "file.bin", DIGEST)


def test_only_missing_files_are_fetched_and_the_error_says_where_to_put_them(address, folder):
    (folder / "old.bin").write_bytes(b"mine")
    ensure({"old.bin": DIGEST, "file.bin": DIGEST}, address, folder)
    assert (folder / "old.bin").read_bytes() == b"mine"
    with pytest.raises(DataError, match=r"lacks gone\.bin, and .*404") as caught:
        ensure({"old.bin": DIGEST, "file.bin": DIGEST, "gone.bin": DIGEST}, address, folder)
    assert caught.value.fix == f"put into {folder}: {address}gone.bin"


def test_an_archive_is_unpacked_and_removed(address, folder, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.bin").write_bytes(b"a")
    archive = write_tar(tmp_path / "published" / "set.tar.gz", inside)
    for _ in range(2):  # the second time it is there already
        ensure_unpacked(f"{address}set.tar.gz", sha256(archive), folder / "new", member="inside")
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))] == ["new", "new/inside", "new/inside/a.bin"]


@pytest.mark.parametrize("evil", ["../escaped.bin", "/tmp/ddp-train-escaped.bin"])
def test_an_archive_cannot_write_outside_its_folder(address, folder, tmp_path, evil):
    path = tmp_path / "published" / "evil.tar.gz"
    (tmp_path / "payload").write_bytes(b"x")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "payload", arcname=evil)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="cannot be unpacked"):
        ensure_unpacked(f"{address}evil.tar.gz", sha256(path), folder, member="inside")
    assert sorted(tmp_path.rglob("*")) == before


def test_links_in_an_archive_are_left_out(address, folder, tmp_path):
    path = tmp_path / "published" / "links.tar.gz"
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.bin").write_bytes(b"a")
    (tmp_path / "inside" / "link.bin").symlink_to("/etc/passwd")
    write_tar(path, tmp_path / "inside")
    ensure_unpacked(f"{address}links.tar.gz", sha256(path), folder, member="inside")
    assert [path.name for path in (folder / "inside").iterdir()] == ["a.bin"]
