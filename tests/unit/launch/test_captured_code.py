"""What no commit has is kept with a run, without secrets and without what is too large, and both are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from ddp_train import FOLDER
from ddp_train.launch import captured_code, source_copy
from ddp_train.launch.captured_code import CodeFolder, capture_code, software

NONE = Path("no_spec")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")


def captured(tmp_path: Path) -> tuple[CodeFolder, dict[str, bytes | str]]:
    """Return what is said of the project, and the content of its files in the archive; a link is a text."""
    archive = tmp_path / "run" / "code.tar.gz"
    code = next(each for each in capture_code(archive, NONE) if each.folder == str(tmp_path / "project"))
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.startswith("project/")]
        content = {m.name.removeprefix("project/"): m.linkname if m.issym() else tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
    return code, content


def test_a_clean_checkout_is_its_commit_and_nothing_else(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    git(project, "checkout", "-q", "--detach")
    git(project, "remote", "add", "origin", "https://planted:token@x.org/a")
    code, content = captured(tmp_path)
    assert (code.commit, code.origin, code.roots) == (git(project, "rev-parse", "HEAD"), "https://x.org/a", ["."]) and content == {}


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
    assert code.deleted == ["b.py", "d.py"]
    assert code.left_out == {"outside": "a link to /etc/hostname"}  # git lists no pipes


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
    assert content == {"a.py": b"x = 1\napi_key = '***'\ny = 2\nuse('***')\n"} and code.redacted == {"a.py": [2, 4]}
    assert set(code.left_out) == names


def test_what_is_too_large_is_left_out_and_named(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_code, "_MAX_BYTES", 1000)
    commit(project, a="1\n")
    (project / "data.bin").write_bytes(bytes(101))
    for number in range(12):
        (project / f"b{number:02}.py").write_bytes(b"x" * 100)
    code, content = captured(tmp_path)
    assert [*content] == [f"b{number:02}.py" for number in range(10)] and set(code.left_out) == {"data.bin", "b10.py", "b11.py"}
    assert code.left_out["data.bin"].endswith("MiB are too much")


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
    found = {code.folder: code for code in capture_code(tmp_path / "code.tar.gz", NONE)}
    assert found[str(other)].name.startswith("project_") and found[str(project)].name == "project"
    assert (str(FOLDER.parent) in found) == (FOLDER.parent / ".git").exists()
    assert not any("site-packages" in folder or f"python{sys.version_info[0]}" in folder for folder in found)


def test_of_many_files_some_are_kept_what_is_changed_and_python_first(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_code, "_MAX_FILES", 3)
    commit(project, z="1\n")
    (project / "y.yaml").write_text("1\n")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "y")
    (project / "y.yaml").write_text("2\n")
    for name in ("a.txt", "b.txt", "c.txt", "d.py"):
        (project / name).write_text("1\n")
    code, content = captured(tmp_path)
    assert [*content] == ["y.yaml", "d.py", "a.txt"] and code.left_out == {".": "there are more than 3 files"}


def test_a_repository_that_git_cannot_read_is_said_and_nothing_is_raised(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    (project / "a.py").write_text("2\n")
    (project / ".git" / "index").write_bytes(b"corrupt")
    code, _ = captured(tmp_path)
    assert "index" in code.left_out["."]


def test_a_submodule_that_points_nowhere_is_said_and_the_rest_is_kept(project: Path, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    commit(tmp_path / "library", inner="1\n")
    commit(project, a="1\n")
    git(project, "submodule", "add", "-q", str(tmp_path / "library"), "library")
    git(project, "commit", "-qm", "y")
    (project / "library" / ".git").write_text("gitdir: /nowhere\n")
    (project / "a.py").write_text("2\n")
    code, content = captured(tmp_path)
    assert content.get("a.py") == b"2\n" and "/nowhere" in code.left_out["."]


def test_when_git_does_not_say_what_is_changed_all_files_are_kept(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(project, a="1\n")
    ask = captured_code.ask_git
    monkeypatch.setattr(captured_code, "ask_git", lambda folder, *words: None if words[0] == "diff" else ask(folder, *words))
    code, content = captured(tmp_path)
    assert content == {"a.py": b"1\n"} and "git did not say what is changed" in code.left_out["."]


def test_whatever_goes_wrong_is_said_and_nothing_is_raised(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a.py").write_text("1\n")
    monkeypatch.setattr(source_copy, "_MAX_ENTRIES", 0)
    assert "more than 0 files" in captured(tmp_path)[0].left_out["."]
    (tmp_path / "file").write_text("")
    assert "FileExistsError" in capture_code(tmp_path / "file" / "code.tar.gz", NONE)[0].left_out["."]


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
