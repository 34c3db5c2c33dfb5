"""The code of a run that no commit has, as RUN/code.tar.gz: with the commits in environment.json it is all that Python imports.

Each folder from which Python imports counts, but for installed packages: the project, ddp_train as a checkout, others on the path. Of a
repository each file that is changed or not committed is kept whole (a diff without its secrets cannot be applied), elsewhere each *.py.

What else can change results besides data and configuration is in environment.json, too (`software`): packages, the processor, variables of
math libraries.
"""

import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

from ddp_train import FOLDER
from ddp_train.launch.source_copy import INSTALLED, OURS, Code, names_below, source_names
from ddp_train.system.files import appears_whole
from ddp_train.system.redaction import redact_code

_MAX_BYTES = 20 << 20  # of a folder, of one file a tenth: what is larger is data, as a rule
_MAX_FILES = 5000  # of a folder; both `times` as much where a setting chooses the files
_GIT_TIMEOUT_S = 10
_SECRET = re.compile(
    r"(?i)\.env(\..*|rc)?|\.(netrc|npmrc|pypirc|pgpass)|id_(rsa|dsa|ecdsa|ed25519).*|(\.git-)?credentials.*|secrets?\..*"
    r"|.*service.*account.*\.json|.*\.(env|pem|key|p12|pfx|jks|keystore)"
)
VARIABLES = re.compile(r"(KMP|GOMP|MKL|DNNL|ONEDNN|OPENBLAS|ATEN|CUBLAS|CUDNN)_\w+|NCCL_(ALGO|PROTO)|NVIDIA_TF32_OVERRIDE")
_VECTORS = re.compile(r"avx|fma|f16c|amx|sse4|sve|asimd|neon|bf16|i8mm")  # by which torch, MKL and oneDNN choose their code


@dataclass(kw_only=True)
class CodeFolder:
    """A folder with code of a run, as environment.json has it."""

    name: str  # in code.tar.gz
    folder: str
    roots: list[str] = field(default_factory=list)  # the folders in it that Python imports from
    commit: str | None = None  # None: code.tar.gz has all of it
    origin: str = ""  # the repository's remote
    deleted: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # file -> why; ".": why more is missing than the files that are named
    redacted: dict[str, list[int]] = field(default_factory=dict)  # file -> lines with a secret


def ask_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints in a folder; None: it fails, takes too long, or is not installed. No hook runs, and no lock is taken."""
    command, environment = ["git", "-c", "core.hooksPath=/dev/null", *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, cwd=folder, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"git could not be asked: {error}", file=sys.stderr)
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def capture_code(archive: Path, spec: Path) -> list[CodeFolder]:
    """Write what no commit has of the code that this process imports, and raise nothing; `spec`: a file, if an engine runs a copy."""
    found: dict[Path, CodeFolder] = {}
    try:
        with appears_whole(archive) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as tar:
            if (copied := _copied(spec)) is not None:
                place = os.getcwd().removesuffix(f"/{next(root for root in copied.roots if root != OURS)}")  # what the copy is of
                folder = Path(copied.folder)
                found[folder] = code = CodeFolder(name="code", folder=place, roots=[*copied.roots])
                add_files(tar, code, folder, names_below(folder), times=10)
                return [code]
            for root in dict.fromkeys(_imported_folders()):
                try:
                    _capture(tar, root, found)
                except Exception as error:
                    top = next((top for top in found if root.is_relative_to(top)), root)
                    _note(found.setdefault(top, CodeFolder(name=f"{top.name}_{len(found)}", folder=str(top))), error)
    except Exception as error:  # a full disk, say
        for code in found.values() or [found.setdefault(Path(), CodeFolder(name="code", folder=os.getcwd()))]:
            _note(code, error)
    return list(found.values())


def _copied(spec: Path) -> Code | None:
    """Return the copy that an engine runs; None: no engine does."""
    if not spec.exists():
        return None
    from ddp_train.launch.spec import Spec

    return Spec.read(spec).code


def _note(code: CodeFolder, error: Exception) -> None:
    code.left_out["."] = f"{type(error).__name__}: {error}"
    print(f"code in {code.folder} is not captured: {error}", file=sys.stderr)


def _capture(tar: tarfile.TarFile, root: Path, found: dict[Path, CodeFolder]) -> None:
    top, names, lister = source_names(root)
    if top not in found and (lister == "git" or root != FOLDER.parent):  # else it lacks our YAML
        name = f"{top.name}_{len(found)}" if top.name in {"", *(code.name for code in found.values())} else top.name
        found[top] = code = CodeFolder(name=name, folder=str(top))
        if lister == "git" and (commit := (ask_git(top, "rev-parse", "HEAD") or "").strip()):
            origin = (ask_git(top, "remote", "get-url", "origin") or "").strip()
            code.commit, code.origin = commit, re.sub(r"^(https?://)[^/]*@", r"\1", origin)  # without a token
            listed = ask_git(top, "diff", "--name-only", "--no-renames", "-z", "HEAD"), ask_git(top, "ls-files", "-z")
            if None in listed:
                code.left_out["."] = "git did not say what is changed: files are kept as they are, deleted ones are not known"
            else:
                changed, tracked = ({*(text or "").split("\0")} - {""} for text in listed)
                code.deleted = sorted(name for name in changed if not os.path.lexists(top / name) or (top / name).is_dir())
                first = changed.difference(code.deleted)
                names = chain(sorted(first), filterfalse((first | (tracked - changed)).__contains__, names))
        add_files(tar, code, top, names)
    if top in found:
        found[top].roots.append(str(root.relative_to(top)))


def _imported_folders() -> Iterable[Path]:
    python = Path(os.__file__).resolve().parent  # its own modules
    for folder in (Path(entry).resolve() for entry in (os.getcwd(), *filter(None, sys.path), str(FOLDER.parent))):
        is_hidden = (folder / FOLDER.name / "__init__.py").exists() and folder != FOLDER.parent  # another checkout of ddp_train
        is_installed = not INSTALLED.isdisjoint(folder.parts) or folder.is_relative_to(python)
        if folder.is_dir() and folder != Path(sys.executable).parent and not is_installed and not is_hidden:
            yield folder


def add_files(tar: tarfile.TarFile, code: CodeFolder, top: Path, names: Iterable[str], *, times: int = 1) -> None:
    """Add files of a folder without secrets, and note on `code` what is left out and which lines are not what they were."""
    left = max_bytes = times * _MAX_BYTES
    for number, name in enumerate(names):
        if number >= times * _MAX_FILES:
            code.left_out["."] = f"there are more than {number:,} files"
            return
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


def software() -> dict[str, Any]:
    """Return the facts of this machine and interpreter for environment.json."""
    variables = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    facts = {"python": platform.python_version(), "platform": platform.platform(), "cpu": _cpu(), "variables": variables}
    packages, sources = dict[str, str](), dict[str, str]()
    for dist in metadata.distributions():
        head = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
        # By a pattern: email's parser takes six times as long.
        name, version = (re.search(rf"^{field}: *(.+?)\r?$", head, re.MULTILINE) for field in ("Name", "Version"))
        if name and version and name[1] not in packages:  # the first one on the path is imported
            packages[name[1]] = version[1]
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # only what comes from no index has this file (PEP 610)
                origin = json.loads(dist.read_text("direct_url.json") or "")
                kind = "editable " if origin.get("dir_info", {}).get("editable") else ""
                vcs, commit = (origin.get("vcs_info", {}).get(key, "") for key in ("vcs", "commit_id"))
                sources[name[1]] = f"{vcs}+{origin['url']}@{commit}" if vcs else f"{kind}{origin['url']}"
    return {**facts, "packages": dict(sorted(packages.items())), "package_sources": sources}


def _cpu() -> dict[str, Any]:
    lines: dict[str, str] = {}
    with suppress(OSError):  # Linux alone has it
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines())
        lines = {key.strip(): value.strip() for key, _, value in pairs}
    vectors = {flag for flag in (lines.get("flags") or lines.get("Features") or "").split() if _VECTORS.search(flag)}
    model = lines.get("model name") or platform.processor() or platform.machine()
    return {"model": model, "vectors": " ".join(sorted(vectors)), "cores": os.cpu_count()}
