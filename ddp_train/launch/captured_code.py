"""The code of a run that no commit has, as RUN/code.tar.gz: with the commits in environment.json it is all that Python imports.

Each folder from which Python imports counts, but for installed packages: the project, ddp_train as a checkout, others on the path. Of a
repository each file that is changed or not committed is kept whole (a diff without its secrets cannot be applied), elsewhere each *.py.
"""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ddp_train import FOLDER
from ddp_train.errors import ConfigError
from ddp_train.launch.source_copy import INSTALLED, OURS, names_below, source_names
from ddp_train.launch.spec import Spec
from ddp_train.system.files import appears_whole
from ddp_train.system.redaction import redact_code

MAX_BYTES = 20 << 20  # of a folder, of one file a tenth: what is larger is data, as a rule
_GIT_TIMEOUT_S = 10
_SECRET = re.compile(r"\.env(\..*)?|\.netrc|id_(rsa|dsa|ecdsa|ed25519)|credentials.*|secrets?\..*|.*\.(pem|key|p12|pfx|jks|keystore)", re.I)


@dataclass(kw_only=True)
class CodeFolder:
    """A folder with code of a run, as environment.json has it."""

    name: str  # in code.tar.gz
    folder: str
    roots: list[str] = field(default_factory=list)  # the folders in it that Python imports from
    commit: str | None = None  # None: code.tar.gz has all of it
    origin: str = ""  # the repository's remote
    deleted: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # file -> why
    redacted: dict[str, list[int]] = field(default_factory=dict)  # file -> lines with a secret


def ask_git(folder: Path, *arguments: str) -> str:
    """Return what git prints in a folder; "": it fails, takes too long, or is not installed. No hook runs, and no lock is taken."""
    command, environment = ["git", "-c", "core.hooksPath=/dev/null", *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, cwd=folder, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"git could not be asked: {error}", file=sys.stderr)
        return ""
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""


def capture_code(archive: Path, spec: Path) -> list[CodeFolder]:
    """Write what no commit has of the code that this process imports; `spec`: a file, if an engine runs a copy of the code."""
    found: dict[Path, CodeFolder] = {}
    with appears_whole(archive) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as tar:
        if spec.exists() and (copied := Spec.read(spec).code) is not None:
            place = os.getcwd().removesuffix(f"/{next(root for root in copied.roots if root != OURS)}")  # what the copy is of
            code, folder = CodeFolder(name="code", folder=place, roots=[*copied.roots]), Path(copied.folder)
            add_files(tar, code, folder, names_below(folder), max_bytes=10 * MAX_BYTES)
            return [code]
        for root in dict.fromkeys(_imported_folders()):
            try:
                top, names, lister = source_names(root)
                if top not in found and (lister == "git" or root != FOLDER.parent):  # else it lacks our YAML
                    name = f"{top.name}_{len(found)}" if top.name in {code.name for code in found.values()} else top.name
                    found[top] = code = CodeFolder(name=name, folder=str(top))
                    if lister == "git" and (commit := ask_git(top, "rev-parse", "HEAD").strip()):
                        code.commit, code.origin = commit, ask_git(top, "remote", "get-url", "origin").strip()
                        changed = {*ask_git(top, "diff", "--name-only", "--no-renames", "-z", "HEAD").split("\0")} - {""}
                        same = {*ask_git(top, "ls-files", "-z").split("\0")} - changed
                        names = (name for name in names if name not in same)
                        code.deleted = sorted(name for name in changed if not os.path.lexists(top / name) or (top / name).is_dir())
                    add_files(tar, code, top, names)
                if top in found:
                    found[top].roots.append(str(root.relative_to(top)))
            except (ConfigError, OSError) as error:
                print(f"code in {root} is not captured: {error}", file=sys.stderr)
    return list(found.values())


def _imported_folders() -> Iterable[Path]:
    python = Path(os.__file__).resolve().parent  # its own modules
    for folder in (Path(entry).resolve() for entry in (os.getcwd(), *filter(None, sys.path), str(FOLDER.parent))):
        is_hidden = (folder / FOLDER.name / "__init__.py").exists() and folder != FOLDER.parent  # another checkout of ddp_train
        is_installed = not INSTALLED.isdisjoint(folder.parts) or folder.is_relative_to(python)
        if folder.is_dir() and folder != Path(sys.executable).parent and not is_installed and not is_hidden:
            yield folder


def add_files(tar: tarfile.TarFile, code: CodeFolder, top: Path, names: Iterable[str], *, max_bytes: int = MAX_BYTES) -> None:
    """Add files of a folder without secrets, and note on `code` what is left out and which lines are not what they were."""
    left = max_bytes
    for name in names:
        path, info = top / name, tarfile.TarInfo(f"{code.name}/{name}")
        try:
            if why := _why_left_out(path, name, min(left, max_bytes // 10)):
                code.left_out[name] = why
            elif path.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                tar.addfile(info)
            else:
                text = path.read_bytes().decode("utf-8", "surrogateescape")  # what is no text stays as it is
                if (clean := redact_code(text)) != text:
                    pairs = zip(text.split("\n"), clean.split("\n"), strict=False)
                    code.redacted[name] = [number for number, (line, kept) in enumerate(pairs, 1) if line != kept]
                content, status = clean.encode("utf-8", "surrogateescape"), path.stat()
                info.size, info.mtime, info.mode = len(content), int(status.st_mtime), 0o755 if status.st_mode & 0o100 else 0o644
                left -= info.size
                tar.addfile(info, io.BytesIO(content))
        except OSError as error:
            code.left_out[name] = error.strerror or str(error)


def _why_left_out(path: Path, name: str, max_bytes: int) -> str:
    if path.is_symlink():
        target = os.readlink(path)
        leads_out = os.path.isabs(target) or os.path.normpath(os.path.join(os.path.dirname(name), target)).startswith("..")
        return f"a link to {target}" if leads_out or os.path.normpath(target) != target else ""
    if _SECRET.fullmatch(path.name):
        return "a file of that name holds secrets"
    size = path.stat().st_size
    return "no plain file" if not path.is_file() else f"{size / 2**20:.1f} MiB are too much" if size > max_bytes else ""
