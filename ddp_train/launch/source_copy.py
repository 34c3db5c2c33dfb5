"""A copy of the source that a run uses, taken when it is submitted: what is edited afterwards has no effect on it.

In a git repository: every tracked file as it lies there now, and every other one that git does not ignore. Elsewhere: the *.py below the
folder where the command stands. Run folders are left out. `ddp_train` itself is copied too where it is installed as a checkout.

    RUN/launch/code/         the files, which nobody should write any more
    RUN/launch/code.sha256   as `sha256sum` writes it; the hash of this text is the hash of the code
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ddp_train import FOLDER
from ddp_train.errors import ConfigError, EnvironmentRefuses, join_few
from ddp_train.run_folder.paths import SWEEP_FILE
from ddp_train.system.files import earlier_copy, write_atomic
from ddp_train.system.folder_lock import HOLDER

INSTALLED = {"site-packages", "dist-packages"}
OURS = ".ddp_train"  # the folder of our own package in the source copy of another project
_RUN_HAS = (".hydra", SWEEP_FILE, HOLDER)  # what tells the folder of a run or a sweep
_MAX_ENTRIES = 100_000  # looked at where no repository says which files are source
_GIT_WITHIN_S = 60
_KEY = "cluster.code_limit_mib"


@dataclass(frozen=True, kw_only=True)
class Code:
    """The copy of the source that a run uses."""

    folder: str  # where it lies, on a file system that every machine sees
    hash: str  # over the names and the bytes of its files
    roots: tuple[str, ...] = (".",)  # the folders in it that Python imports from, in this order

    def python_path(self) -> str:
        """Return the beginning of PYTHONPATH with which this code is imported, and none that lies elsewhere."""
        return os.pathsep.join(os.path.normpath(os.path.join(self.folder, root)) for root in self.roots)


class Source(NamedTuple):
    """The source that a run would use."""

    files: dict[str, Path]  # by their names in the copy
    roots: tuple[str, ...]  # the folders of it that Python imports from
    num_bytes: int


def copy_source(into: Path, *, limit_mib: int) -> Code:
    """Copy the source of the folder where this process stands, and return what the copy is.

    A copy that is there already, of an earlier launch, stays as code.1, code.2, ... where it differs. What is larger than the
    limit is refused, with the largest files.
    """
    source = read_source(limit_mib=limit_mib)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent, ignore_cleanup_errors=True) as scratch:
        temporary = Path(scratch) / into.name
        for name, path in source.files.items():
            _copy(path, temporary / name)
        temporary.mkdir(exist_ok=True)  # of no files
        listing = _listing(temporary)
        code = Code(folder=str(into), hash=_hash(listing), roots=source.roots)
        if into.exists() and _listing(into) == listing:
            return code
        if into.exists():
            into.rename(earlier_copy(into))
        temporary.rename(into)
    write_atomic(_listing_file(into), listing)
    return code


def copy_source_for_several(launch: Path, *, limit_mib: int) -> Code:
    """Copy the source as `copy_source` does, for runs that are submitted hours apart: each copy has a folder of its own, by its hash."""
    launch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".code.", dir=launch, ignore_cleanup_errors=True) as scratch:
        code = copy_source(temporary := Path(scratch) / "code", limit_mib=limit_mib)
        folder = launch / f"code_{code.hash[:12]}"
        if not folder.exists():
            _listing_file(temporary).rename(_listing_file(folder))
            temporary.rename(folder)
    return replace(code, folder=str(folder))


def require_unchanged(code: Code) -> None:
    """Refuse a machine that does not see the code that was submitted: name the files that differ (EnvironmentRefuses)."""
    folder, host = Path(code.folder), os.uname().nodename
    listing = _listing(folder)
    if _hash(listing) == code.hash:
        return
    if not folder.is_dir():
        expected = "a run folder on a file system that every machine sees"
        raise EnvironmentRefuses(happened=f"{host} does not see {folder}, the run's code", expected=expected)
    try:
        submitted = set(_listing_file(folder).read_text(encoding="utf-8").splitlines())
    except OSError:
        submitted = set()
    names = sorted({line.partition("  ")[2] for line in submitted ^ set(listing.splitlines())}) if submitted else ["unknown files"]
    happened = f"the run's code on {host} is not what was submitted: {join_few(names, 3)} in {folder}"
    fix = f"run `ddp-train resume {folder.parents[1]}` in the folder of your source, which makes a new copy"
    raise EnvironmentRefuses(happened=happened, expected="an unchanged copy", fix=fix)


def read_source(*, limit_mib: int) -> Source:
    """Return the files that `copy_source` would copy."""
    here = Path.cwd().resolve()
    top, names, _ = source_names(here)
    files = {name: top / name for name in names}
    roots = [str(folder.relative_to(top)) for folder in (here, *imported_folders()) if folder.is_relative_to(top)]
    conf = FOLDER.parent / "conf"
    has_ours = {FOLDER / "__init__.py", conf / "config.yaml"} <= set(files.values())
    if not has_ours and INSTALLED.isdisjoint(FOLDER.parts):
        files |= {f"{OURS}/{path.relative_to(FOLDER.parent)}": path for path in (*_python_files(FOLDER), *FOLDER.glob("config/*.yaml"))}
        files |= {f"{OURS}/{FOLDER.name}/conf/{path.relative_to(conf)}": path for path in sorted(conf.rglob("*.yaml"))}
        roots = [OURS, *roots]
    return Source(files, tuple(dict.fromkeys(roots)), _require_size(files, top, limit_mib))


def imported_folders() -> Iterator[Path]:
    """Yield the folders that Python imports from now, first the current one, without those of installed packages."""
    python = Path(os.__file__).resolve().parent  # its own modules
    for folder in dict.fromkeys(Path(entry).resolve() for entry in (os.getcwd(), *filter(None, sys.path), str(FOLDER.parent))):
        is_hidden = (folder / FOLDER.name / "__init__.py").exists() and folder != FOLDER.parent  # another checkout of ddp_train
        is_installed = not INSTALLED.isdisjoint(folder.parts) or folder.is_relative_to(python)
        if folder.is_dir() and folder != Path(sys.executable).parent and not is_installed and not is_hidden:
            yield folder


def source_names(here: Path) -> tuple[Path, Iterator[str], str]:
    """Return the top of the source that a command in a folder uses, its files' names below that, and who has listed them: git or folder."""
    try:
        top = Path(git(here, "rev-parse", "--show-toplevel").removesuffix("\n"))
    except ConfigError as error:
        if shutil.which("git") and "not a git repository" not in error.happened:
            raise
        return here, (str(path.relative_to(here)) for path in _python_files(here)), "folder"
    return top, (name for name in _repository_files(top) if not _is_of_a_run(top, (top / name).parent)), "git"


def git(folder: Path, *words: str, given: str = "", within_s: float | None = _GIT_WITHIN_S) -> str:
    """Return the output of git in a folder, with `given` as its input. No hook runs. Raises ConfigError: it fails."""
    command = ["git", "-c", "core.hooksPath=/dev/null", *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, input=os.fsencode(given), capture_output=True, check=True, timeout=within_s
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = os.fsdecode(getattr(error, "stderr", None) or b"").strip()
        raise ConfigError(happened=f"`git {shlex.join(words)}` fails in {folder}: {said or error}") from None
    return os.fsdecode(done.stdout)


def _repository_files(root: Path, prefix: str = "") -> Iterator[str]:
    """Yield the names of the files of a repository and of those in it (submodules), Python's first. ConfigError: git cannot list them."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in sorted({*listed.split("\0")}, key=lambda name: (not name.endswith(".py"), name)):
        path = root / name
        if name and path.is_dir() and not path.is_symlink():
            if (path / ".git").exists():
                yield from _repository_files(path, f"{prefix}{name.rstrip('/')}/")
        elif name and os.path.lexists(path):  # else it was deleted, and git has not been told
            yield f"{prefix}{name}"


def _python_files(top: Path) -> Iterator[Path]:
    """Yield the *.py below a folder that is no repository, without those of environments, runs and hidden folders."""
    seen = 0
    for folder, subfolders, names in os.walk(top):
        seen += len(names)
        if seen > _MAX_ENTRIES:
            happened = f"more than {_MAX_ENTRIES:,} files are below {top}, and it is no git repository that tells source from data"
            fix = "cd to the folder of your code; or run `git init` there, with data and outputs in .gitignore"
            raise ConfigError(happened=happened, fix=fix)
        here = Path(folder)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in ("__pycache__", *INSTALLED))
        subfolders[:] = [name for name in subfolders if not any((here / name / mark).exists() for mark in ("pyvenv.cfg", *_RUN_HAS))]
        yield from (here / name for name in sorted(names) if name.endswith(".py"))


@cache
def _is_of_a_run(root: Path, folder: Path) -> bool:
    return folder != root and (any((folder / mark).exists() for mark in _RUN_HAS) or _is_of_a_run(root, folder.parent))


def _require_size(files: dict[str, Path], top: Path, limit_mib: int) -> int:
    """Return the size of all files in bytes; refuse more than the limit."""
    sizes = sorted(((path.stat().st_size if path.is_file() else 0, name) for name, path in files.items()), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > limit_mib << 20:
        largest = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for size, name in sizes[:3])
        happened = f"the source in {top} has {len(sizes)} files of {total / 2**20:.1f} MiB together; the largest are {largest}"
        expected = f"{limit_mib} MiB at most: each run gets a copy, so that later edits do not change it"
        fix = f"add files that are not source to .gitignore, or set {_KEY}={-(-total // 2**20)}"
        raise ConfigError(key=_KEY, happened=happened, expected=expected, fix=fix)
    return total


def _copy(source: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and not source.is_file():  # to a folder, or to nothing: data, say, which stays where it is
        copy.symlink_to(source.parent / os.readlink(source))
        return
    shutil.copyfile(source, copy)
    copy.chmod(source.stat().st_mode & 0o555 | 0o400)


def _listing(folder: Path) -> str:
    """Return the names and the hashes of all files of a copy, as sha256sum writes them. What Python compiles there does not count."""
    lines = []
    for name in sorted(names_below(folder)):
        path = folder / name
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        escaped = name.encode(errors="backslashreplace").decode().replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"{'' if escaped == name else chr(92)}{hashlib.sha256(content).hexdigest()}  {escaped}\n")
    return "".join(lines)


def names_below(folder: Path) -> Iterable[str]:
    for place, subfolders, names in os.walk(folder):
        links = [name for name in subfolders if os.path.islink(os.path.join(place, name))]
        subfolders[:] = [name for name in subfolders if name != "__pycache__" and name not in links]
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in (*names, *links))


def _hash(listing: str) -> str:
    return hashlib.sha256(listing.encode()).hexdigest()


def _listing_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sha256")
