"""A run's code comes back as it was, what differs here has a name, and two curves are compared to the bit."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_train.archive import reproduction
from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.reproduction import (
    changed_code,
    code_of,
    compare_losses,
    differences,
    repository_of,
    restore_code,
    this_machine,
    unpack,
)
from ddp_train.errors import ConfigError, DataError
from ddp_train.launch.captured_code import capture_code
from tests.unit.launch.repository import commit, git, project

__all__ = ["project"]


def run_with(folder: Path, **environment: Any) -> ArchivedRun:
    run = ArchivedRun(folder)
    run.environment = environment
    return run


def begun(folder: Path) -> ArchivedRun:
    """Return a run that has begun in the current folder."""
    run = ArchivedRun(folder)
    capture_code(run.folder)
    run.environment = {"working_directory": os.getcwd()}
    return run


def tree(folder: Path) -> dict[str, Any]:
    files = [path for path in sorted(folder.rglob("*")) if ".git" not in path.parts and (path.is_symlink() or path.is_file())]
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else (path.read_bytes(), path.stat().st_mode & 0o100)
        for path in files
    }


def test_the_code_comes_back_as_it_was(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sub").mkdir()
    commit(project, a="1\n", b="2\n", c="3\n", d="4\n")
    (project / "a.py").write_bytes(bytes(range(255, -1, -1)))  # without 12345678, which was a secret of another test
    (project / "b.py").unlink()
    (project / "c.py").chmod(0o755)
    (project / "d.py").unlink()
    (project / "d.py").mkdir()
    (project / "d.py" / "inner.py").write_text("5\n")
    (project / "inside").symlink_to("c.py")
    before = tree(project)
    monkeypatch.chdir(project / "sub")
    run = begun(tmp_path / "run")
    monkeypatch.chdir(project)
    git(project, "checkout", "-qf", "HEAD")
    git(project, "clean", "-qfd")
    (project / "a.py").write_text("later\n")
    git(project, "commit", "-qam", "later")
    here, python_path = restore_code(run, tmp_path / "into")
    assert tree(tmp_path / "into" / "project") == before
    assert here == tmp_path / "into" / "project" / "sub" and str(tmp_path / "into" / "project") in python_path
    assert [*changed_code(code_of(run)[:1])] == [] and git(project, "status", "--porcelain") == ""


def test_a_commit_that_is_gone_is_named_with_what_helps(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    run = begun(tmp_path / "run")
    run.code[0].commit = "1" * 40
    code = code_of(run)
    assert next(changed_code(code)) == f"code project: commit {'1' * 40} is in no repository here"
    with pytest.raises(ConfigError, match="git fetch REMOTE 1111"):
        repository_of(code[0])
    with pytest.raises(ConfigError, match="in no repository here"):
        restore_code(run, tmp_path / "into")


def test_names_in_a_forged_list_lead_nowhere(project: Path, tmp_path: Path) -> None:
    commit(project, a="1\n")
    (tmp_path / "precious.py").write_text("1\n")
    run = begun(tmp_path / "run")
    run.code[0].changed = ["../../precious.py"]
    with pytest.raises(ConfigError, match="outside repository"):
        restore_code(run, tmp_path / "into")
    assert (tmp_path / "precious.py").exists()
    for key, value in {"name": "../x", "commit": "--upload-pack=x", "unknown": 1}.items():
        run.folder.code_list.write_text(json.dumps({"folders": [{**vars(run.code[0]), key: value}]}))
        with pytest.raises(ConfigError, match="cannot be reproduced"):
            code_of(ArchivedRun(run.root))
    with pytest.raises(ConfigError, match="ended before its code was kept"):
        code_of(ArchivedRun(tmp_path / "killed before its code was kept"))


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


def test_files_folders_and_links_inside_come_out_of_an_archive(tmp_path: Path) -> None:
    script = member("code/run.sh")
    script.mode = 0o4777
    archive = write(tmp_path / "a.tar.gz", member("code", tarfile.DIRTYPE), script, member("code/sub/link", tarfile.SYMTYPE, "../run.sh"))
    unpack(archive, tmp_path / "into")
    assert (tmp_path / "into/code/sub/link").read_text() == "abc"
    assert (tmp_path / "into/code/run.sh").stat().st_mode & 0o7777 & ~0o755 == 0  # executable, neither setuid nor writable by others


EVIL: dict[str, Callable[[], list[tarfile.TarInfo]]] = {
    "up": lambda: [member("../out")],
    "up within": lambda: [member("a/../../out")],
    "link out": lambda: [member("a", tarfile.SYMTYPE, "../out")],
    "absolute link": lambda: [member("a", tarfile.SYMTYPE, "/etc/passwd")],
    "link that looks inside": lambda: [member("d/s", tarfile.SYMTYPE, ".."), member("d/x", tarfile.SYMTYPE, "s/../..")],
    "through a link": lambda: [member("a", tarfile.SYMTYPE, "b"), member("a/out")],
    "hard link": lambda: [member("a", tarfile.LNKTYPE, "/etc/passwd")],
    "hard link inside": lambda: [member("a", tarfile.LNKTYPE, "good")],
    "device": lambda: [member("a", tarfile.CHRTYPE)],
    "pipe": lambda: [member("a", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("evil", EVIL)
def test_an_archive_that_leads_out_of_its_folder_is_refused(evil: str, tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", member("good"), *EVIL[evil]())
    with pytest.raises(DataError, match=r"a\.tar\.gz is not used"):
        unpack(archive, tmp_path / "into")
    assert {*os.listdir(tmp_path)} <= {"a.tar.gz", "into"} and not (tmp_path / "into" / "d" / "x").is_symlink()


def test_a_damaged_archive_and_one_that_is_too_large_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write(tmp_path / "a.tar.gz", *(member(f"a{number}") for number in range(9)))
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:60])
    (tmp_path / "text.tar.gz").write_text("hello")
    for name in ("cut", "text"):
        with pytest.raises(DataError, match=f"{name}.tar.gz is not used"):
            unpack(tmp_path / f"{name}.tar.gz", tmp_path / "into")
    monkeypatch.setattr(reproduction, "_MAX_BYTES", 20)
    with pytest.raises(DataError, match="2 GiB"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_what_differs_has_a_name_and_what_one_does_not_say_is_not_compared() -> None:
    ranks = [{"device": "cuda:0 (H100)", "threads": 4}, {"device": "cuda:1 (H100)", "threads": 4}]
    facts: dict[str, Any] = {"torch": "2.1", "packages": {"numpy": "1", "old": "3"}, "cpu": {"model": "A"}, "variables": {"MKL_CBWR": "X"}}
    run = run_with(Path("a"), **facts, ranks=ranks, world_size=2)
    changed = {"torch": "2.2", "packages": {"numpy": "2", "new": "1"}, "cpu": {"model": "B"}, "variables": {}}
    other = run_with(Path("b"), **changed, ranks=[{"device": "cuda:0 (H100)"}])
    assert differences(run, run) == [] and set(differences(run, other)) == {
        *(
            "device: cuda:1 (H100) is absent",
            "torch: 2.1 -> 2.2",
            "package numpy: 1 -> 2",
            "package old: 3 -> absent",
            "package new: absent -> 1",
        ),
        *("cpu model: A -> B", "variable MKL_CBWR: X -> absent"),
    }
    here = this_machine()
    assert differences(here, here) == [] and here.environment["python"] == sys.version.partition(" ")[0]


def test_curves_are_compared_by_their_values_and_not_by_their_times(tmp_path: Path) -> None:
    def recorded(name: str, *losses: float | None) -> ArchivedRun:
        (tmp_path / name).mkdir()
        rows = [
            {"split": "train", "step": step, "time": hash(name), "step_ms": len(name), "loss": loss} for step, loss in enumerate(losses, 1)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return ArchivedRun(tmp_path / name)

    first = recorded("first", 2.0, None, 1.0)
    assert compare_losses(first, recorded("again", 2.0, None)) == (True, "the same losses bit for bit: 2 records up to step 2")
    is_same, text = compare_losses(first, recorded("other", 2.0, None, 1.5))
    assert not is_same and text == ("the losses differ from step 3 on: train/loss 1.0 -> 1.5; 3 records up to step 3")
    assert compare_losses(recorded("nan_alone", None), recorded("nan_again", None)) == (
        False,
        "not all could be compared: 1 record up to step 1; no finite train/loss is among them",
    )
    assert not compare_losses(first, recorded("none"))[0] and not compare_losses(first, recorded("nan", 2.0, 1.0))[0]


def test_what_one_run_alone_has_is_not_called_the_same(tmp_path: Path) -> None:
    def recorded(name: str, *rows: dict[str, Any]) -> ArchivedRun:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return ArchivedRun(tmp_path / name)

    train = [{"split": "train", "step": step, "loss": 1.0, "grad_norm": 2.0} for step in (1, 2, 3)]
    evaluated = {"split": "eval", "step": 2, "loss": 1.0}
    old = recorded("old", train[0], train[1], evaluated, train[2])
    assert compare_losses(old, recorded("same", train[0], train[1], evaluated))[0]
    is_same, text = compare_losses(old, recorded("no_eval", *train))
    assert not is_same and text.endswith("; the new run has no eval/loss of step 2") and "bit for bit" not in text
    no_norm = [{key: value for key, value in row.items() if key != "grad_norm"} for row in train]
    assert "the new run has no train/grad_norm of step 1" in compare_losses(old, recorded("no_norm", no_norm[0], *train[1:], evaluated))[1]
    assert "the old run has no eval/loss of step 2" in compare_losses(recorded("bare", *train), old)[1]
    assert compare_losses(recorded("killed", *train[:2]), recorded("ends_there", *train[:2], evaluated))[0]  # which evaluates at its end
