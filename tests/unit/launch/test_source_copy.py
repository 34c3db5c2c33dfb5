"""The code of a run is what lay there when it was submitted, and each machine can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_train import FOLDER
from ddp_train.errors import ConfigError, EnvironmentRefuses
from ddp_train.launch import source_copy
from ddp_train.launch.source_copy import Code
from tests.unit.launch.repository import git, project

__all__ = ["project"]

INTO = Path("outputs/x/2026/launch/code")


def write(path: str, text: str = "x = 1\n") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def take(into: Path = INTO) -> Code:
    (into.parents[1] / ".hydra").mkdir(parents=True, exist_ok=True)  # as the folder of a run has it
    return source_copy.copy_source(into.absolute(), limit_mib=100)


def names(code: Code) -> set[str]:
    """Return the user's files in a source copy."""
    found = {str(path.relative_to(code.folder)) for path in Path(code.folder).rglob("*") if not path.is_dir()}
    return {name for name in found if not name.startswith(".ddp_train/")}


def test_it_has_what_is_tracked_changed_or_new_and_not_what_git_ignores(project: Path) -> None:
    git(project, "init")
    write(".gitignore", "*.log\n")
    for path in ("model.py", "gone.py", "data/words.txt"):
        write(path)
    git(project, "add", ".")
    git(project, "commit", "-m", "x")
    write("model.py", "changed = 1\n")
    write("src/new.py")
    write("train.log")
    Path("gone.py").unlink()
    write("outputs/x/2025/.hydra/config.yaml")
    write("outputs/x/2025/checkpoints/step_1/weights")
    code = take()
    assert names(code) == {".gitignore", "model.py", "data/words.txt", "src/new.py"}
    assert Path(code.folder, "model.py").read_text() == "changed = 1\n"
    write("model.py", "edited while it was queued\n")
    source_copy.require_unchanged(code)
    assert Path(code.folder, "model.py").read_text() == "changed = 1\n"


def test_python_finds_there_what_it_finds_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(project, "init")
    write("src/lib.py")
    write("experiments/mine.py")
    monkeypatch.chdir(project / "experiments")
    monkeypatch.syspath_prepend(str(project / "src"))
    code = source_copy.copy_source(project / INTO, limit_mib=100)
    program = "import lib, mine, ddp_train; print(*(each.__file__ for each in (lib, mine, ddp_train)), ddp_train.CONF)"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": code.python_path(), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
        cwd=project / "experiments",
    )
    assert all(line.startswith(code.folder) for line in ran.stdout.split()), ran.stdout
    source_copy.require_unchanged(code)  # what Python has compiled there is no difference


def test_without_a_repository_it_is_the_python_below(project: Path) -> None:
    for path in ("mine.py", "package/part.py", "data/image.bin", ".hidden/a.py", "venv/pyvenv.cfg", "venv/lib/b.py", "run/.hydra/c.py"):
        write(path)
    assert names(take()) == {"mine.py", "package/part.py"}


def test_a_submodule_and_links_come_along(project: Path) -> None:
    write("part/inner.py")
    for words in (("-C", "part", "init"), ("-C", "part", "add", "."), ("-C", "part", "commit", "-m", "x"), ("init",)):
        git(project, *words)
    git(project, "add", "part")
    write("real.py", "real = 1\n")
    Path("link.py").symlink_to("real.py")
    Path("data").symlink_to("../elsewhere")
    code = take()
    assert names(code) == {"part/inner.py", "real.py", "link.py", "data"}
    assert Path(code.folder, "link.py").read_text() == "real = 1\n"
    assert Path(code.folder, "data").readlink() == project / "../elsewhere"
    source_copy.require_unchanged(code)


@pytest.mark.parametrize("change", ["edit", "remove", "add"])
def test_a_changed_copy_is_refused_and_the_file_named(project: Path, change: str) -> None:
    write("mine.py")
    code = take()
    file = Path(code.folder, "added.py" if change == "add" else "mine.py")
    if change == "remove":
        file.unlink()
    else:
        file.write_text("other = 1\n") if change == "add" else (file.chmod(0o600), file.write_text("other = 1\n"))
    with pytest.raises(EnvironmentRefuses, match=file.name):
        source_copy.require_unchanged(code)


def test_a_machine_that_does_not_see_it_says_so(project: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefuses, match="every machine sees"):
        source_copy.require_unchanged(Code(folder=str(tmp_path / "nowhere"), hash="0"))


def test_too_much_is_refused_with_the_largest_files(project: Path) -> None:
    git(project, "init")
    write("data.bin", "x" * (2 << 20))
    write("mine.py")
    with pytest.raises(ConfigError, match=r"data\.bin \(2\.0 MiB\)") as refused:
        source_copy.copy_source(INTO.absolute(), limit_mib=1)
    assert "gitignore" in refused.value.fix and not INTO.exists()


def test_the_next_start_has_its_own_and_keeps_the_one_before(project: Path) -> None:
    write("mine.py", "first = 1\n")
    first = take()
    assert take() == first and not Path(f"{first.folder}.1").exists()
    write("mine.py", "second = 1\n")
    second = take()
    assert second.hash != first.hash
    assert Path(f"{first.folder}.1/mine.py").read_text() == "first = 1\n"
    source_copy.require_unchanged(second)


def test_names_that_no_text_file_should_have_are_hashed_too(project: Path) -> None:
    for name in ("a\nb.py", "c\\d.py", "e  f.py", b"\xff.py".decode(errors="surrogateescape")):
        write(name)
    source_copy.require_unchanged(take())


def test_our_own_package_comes_along_where_it_is_a_checkout(project: Path) -> None:
    code = take()
    ours = Path(code.folder, code.roots[0])
    assert (ours / "ddp_train/__main__.py").read_bytes() == (FOLDER / "__main__.py").read_bytes()
    assert (ours / "ddp_train/conf/config.yaml").exists()
    assert (ours / "ddp_train/config/field_words.yaml").exists()


def test_a_look_says_what_would_be_copied_and_copies_nothing(project: Path) -> None:
    write("model.py")
    write("src/pages.py")
    before = sorted(project.rglob("*"))
    source = source_copy.read_source(limit_mib=100)
    assert sorted(project.rglob("*")) == before
    taken = take()
    copied = [path for path in Path(taken.folder).rglob("*") if path.is_file()]
    assert source.roots == taken.roots
    assert (len(source.files), source.num_bytes) == (len(copied), sum(path.stat().st_size for path in copied))


def test_a_copy_that_fails_leaves_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, copy: Path) -> None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("half")
        raise OSError("the disk is full")

    write("model.py")
    monkeypatch.setattr(source_copy, "_copy", full)
    with pytest.raises(OSError, match="full"):
        take()
    assert list(INTO.parent.iterdir()) == []
