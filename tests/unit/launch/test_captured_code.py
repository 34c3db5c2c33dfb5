"""What no commit has is kept with a run, without secrets and without what is too large, and both are named."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from ddp_train import FOLDER
from ddp_train.errors import ConfigError
from ddp_train.launch import captured_code, source_copy
from ddp_train.launch.captured_code import CodeFolder, capture_code, software
from ddp_train.run_folder.paths import RunFolder
from tests.unit.launch.repository import commit, git, project

__all__ = ["project"]


def captured(tmp_path: Path) -> tuple[CodeFolder, dict[str, bytes | str]]:
    """Return what is said of the project, and the content of its files in the archive; a link is a text."""
    run_folder = RunFolder(tmp_path / "run")
    code = next(each for each in capture_code(run_folder) if each.folder == str(tmp_path / "project"))
    assert vars(code) in json.loads(run_folder.code_list.read_text())["folders"]
    with tarfile.open(run_folder.code_archive) as tar:
        members = [member for member in tar if member.name.startswith("project/")]
        content = {m.name.removeprefix("project/"): m.linkname if m.issym() else tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    return code, content


def test_a_clean_checkout_is_its_commit_and_nothing_else(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    git(project, "checkout", "-q", "--detach")
    code, content = captured(tmp_path)
    assert (code.commit, code.roots, code.changed) == (git(project, "rev-parse", "HEAD"), ["."], []) and content == {}


def test_what_is_changed_added_and_deleted_is_kept_whole(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n", b="2\n", c="3\n", d="4\n")
    (project / "a.py").write_bytes(binary := bytes(range(255, -1, -1)))
    (project / "b.py").unlink()
    (project / "c.py").chmod(0o755)
    (project / "d.py").unlink()
    (project / "d.py").mkdir()
    (project / "d.py" / "inner.py").write_text("5\n")
    (project / "inside").symlink_to("a.py")
    (project / "outside").symlink_to("/etc/hostname")
    (project / "new file.py").write_text("6\n")
    os.mkfifo(project / "pipe")
    code, content = captured(tmp_path)
    assert content == {"a.py": binary, "c.py": b"3\n", "d.py/inner.py": b"5\n", "inside": "a.py", "new file.py": b"6\n"}
    assert code.changed == ["a.py", "b.py", "c.py", "d.py"] and set(code.kept) == set(content)
    assert code.differs == {"outside": "not kept: a link to /etc/hostname"}  # git lists no pipes


def test_secrets_are_replaced_and_named_and_files_of_secrets_are_left_out(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "planted-token-1")
    commit(project, a="1\n")
    (project / "a.py").write_text("x = 1\napi_key = 'planted-literal-2'\ny = 2\nuse('planted-token-1')\n")
    names = {".env", ".envrc", "prod.env", "id_rsa_old", "credentials.json", "a.pem", ".git-credentials", ".npmrc", ".pypirc", ".pgpass"}
    for name in (names := {*names, "my-service-account-1.json"}):
        (project / name).write_text("planted-file-3")
    code, content = captured(tmp_path)
    assert content == {"a.py": b"x = 1\napi_key = '***'\ny = 2\nuse('***')\n"}
    assert code.differs.pop("a.py") == "*** in place of a secret, line 2, 4" and set(code.differs) == names


def test_what_is_too_large_is_left_out_and_named(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captured_code._MAX_FILES, "git", 100)
    monkeypatch.setattr(captured_code, "_BYTES_PER_FILE", 10)
    commit(project, a="1\n")
    (project / "data.bin").write_bytes(bytes(101))
    for number in range(12):
        (project / f"b{number:02}.py").write_bytes(b"x" * 100)
    code, content = captured(tmp_path)
    assert [*content] == [f"b{number:02}.py" for number in range(10)] and set(code.differs) == {"data.bin", "b10.py", "b11.py"}
    assert code.differs["data.bin"].endswith("MiB are too much")


def test_submodules_are_kept_whole(project: Path, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    commit(tmp_path / "library", inner="1\n")
    commit(project, a="1\n")
    git(project, "submodule", "add", "-q", str(tmp_path / "library"), "library")
    git(project, "commit", "-qm", "y")
    assert captured(tmp_path)[1] == {"library/inner.py": b"1\n"}


def test_without_a_commit_or_a_repository_all_python_files_are_kept(project: Path, tmp_path: Path) -> None:
    (project / "a.py").write_text("1\n")
    code, content = captured(tmp_path)
    assert code.commit is None and content == {"a.py": b"1\n"}
    git(project, "init", "-q")
    assert captured(tmp_path)[1] == {"a.py": b"1\n"}


def test_ddp_train_as_a_checkout_and_other_folders_on_the_path_count(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / "other" / "project").mkdir(parents=True)
    (other / "library.py").write_text("1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    found = {code.folder: code for code in capture_code(RunFolder(tmp_path / "run"))}
    assert found[str(other)].name.startswith("project_") and found[str(project)].name == "project"
    assert (str(FOLDER.parent) in found) == (FOLDER.parent / ".git").exists()
    assert not any("site-packages" in folder or f"python{sys.version_info[0]}" in folder for folder in found)


def test_of_many_files_some_are_kept_python_first(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lister in captured_code._MAX_FILES:
        monkeypatch.setitem(captured_code._MAX_FILES, lister, 2)
    for name in ("a.txt", "b.txt", "c.py"):
        (project / name).write_text("1\n")
    git(project, "init", "-q")
    code, content = captured(tmp_path)
    assert [*content] == ["c.py", "a.txt"] and code.differs == {".": "only 2 of its files are kept"}
    (project / ".git").rename(tmp_path / "no_git")
    for name in ("d", "e"):
        (project / f"{name}.py").write_text("1\n")
    code, content = captured(tmp_path)
    assert len(content) == 2 and code.differs == {".": "only 2 of its files are kept"}


def test_a_submodule_that_points_nowhere_is_said_and_the_rest_is_kept(project: Path, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    commit(tmp_path / "library", inner="1\n")
    commit(project, a="1\n")
    git(project, "submodule", "add", "-q", str(tmp_path / "library"), "library")
    git(project, "commit", "-qm", "y")
    (project / "library" / ".git").write_text("gitdir: /nowhere\n")
    (project / "a.py").write_text("2\n")
    code, content = captured(tmp_path)
    assert content.get("a.py") == b"2\n" and "/nowhere" in code.differs["."]


def test_a_folder_that_cannot_be_read_is_said_and_the_others_are_kept(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(project, a="1\n")
    (project / ".git" / "index").write_bytes(b"corrupt")
    assert "`git diff" in captured(tmp_path)[0].differs["."]
    (project / ".git").rename(tmp_path / "no_git")
    monkeypatch.setattr(source_copy, "_MAX_ENTRIES", 0)
    assert "more than 0 files" in captured(tmp_path)[0].differs["."]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"`git rev-parse` fails in .*No such file"):
        source_copy.git(project, "rev-parse")


def test_the_packages_have_the_names_and_versions_of_their_own_metadata() -> None:
    packages = software()["packages"]
    assert packages == {each.name: each.version for each in reversed([*metadata.distributions()])}
    assert "torch" in packages


def test_a_package_that_comes_from_no_index_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = {
        "local": {"url": "file:///a", "dir_info": {"editable": True}},
        "hub": {"url": "https://x.org/hub", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        "broken": None,
    }
    for name, origin in origins.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n\nText: 3")
        (folder / "direct_url.json").write_text(json.dumps(origin) if origin else "{")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = software()
    assert {name: found["packages"][name] for name in origins} == dict.fromkeys(origins, "1.0")
    assert found["package_sources"] | {"local": "editable file:///a", "hub": "git+https://x.org/hub@abc"} == found["package_sources"]
    assert "broken" not in found["package_sources"]


def test_the_processor_and_the_variables_of_math_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("LD_PRELOAD_NOT", "x")
    found = software()
    assert found["variables"]["MKL_CBWR"] == "AVX2" and "LD_PRELOAD_NOT" not in found["variables"]
    assert found["cpu"]["model"] and found["cpu"]["cores"]
