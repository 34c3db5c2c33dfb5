"""The code of a run: RUN/code.json says what Python imports, and RUN/code.tar.gz has each file of it that no commit has.

Each folder from which Python imports counts, but for installed packages: the project, ddp_train as a checkout, others on the path. Of a
repository the commit is noted, and each file that is changed or not committed is kept whole (a diff without its secrets cannot be
applied); elsewhere each *.py is kept.

What can change results, apart from data and configuration, is in environment.json (`software`): packages, the processor, variables of math
libraries.
"""

import hashlib
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_train import FOLDER
from ddp_train.errors import ConfigError, join_few
from ddp_train.launch.source_copy import OURS, Code, git, imported_folders, names_below, source_names
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import appears_whole, write_json
from ddp_train.system.redaction import redact_code

_MAX_FILES = {"git": 5000, "folder": 1000}  # of a folder, by who has listed them: without git much may be no code
_MAX_CHOSEN = 50_000  # where a setting chooses the files
_BYTES_PER_FILE = 4 << 10  # so many together, one file a tenth of them: what is larger is data, as a rule
_SECRET = re.compile(
    r"(?i)\.env(\..*|rc)?|\.(netrc|npmrc|pypirc|pgpass)|id_(rsa|dsa|ecdsa|ed25519).*|(\.git-)?credentials.*|secrets?\..*"
    r"|.*service.*account.*\.json|.*\.(env|pem|key|p12|pfx|jks|keystore)"
)
VARIABLES = re.compile(r"(KMP|GOMP|MKL|DNNL|ONEDNN|OPENBLAS|ATEN|CUBLAS|CUDNN)_\w+|NCCL_(ALGO|PROTO)|NVIDIA_TF32_OVERRIDE")
_VECTORS = re.compile(r"avx|fma|f16c|amx|sse4|sve|asimd|neon|bf16|i8mm")  # by which torch, MKL and oneDNN choose their code


@dataclass(kw_only=True)
class CodeFolder:
    """A folder with code of a run, as code.json has it."""

    name: str  # in code.tar.gz
    folder: str
    roots: list[str] = field(default_factory=list)  # the folders in it that Python imports from, first that where the run was started
    commit: str | None = None  # None: code.tar.gz has all of it
    changed: list[str] = field(default_factory=list)  # the files of the commit that are no more what they were
    kept: dict[str, str] = field(default_factory=dict)  # file -> the beginning of its sha256
    differs: dict[str, str] = field(default_factory=dict)  # file -> how that differs which is kept of it; ".": of the folder

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name or not re.fullmatch("[0-9a-f]{40,64}|None", str(self.commit)):
            raise ValueError(f"{self.name!r} leads out of a folder, or {self.commit!r} is no commit but an option of git's")


def capture_code(run_folder: RunFolder) -> list[CodeFolder]:
    """Keep the code that this process imports, or the copy of it that an engine runs. Raises OSError: a file cannot be written."""
    found: dict[Path, CodeFolder] = {}
    copied: Code | None = None
    if run_folder.spec.exists():  # an engine runs it
        from ddp_train.launch.spec import Spec

        copied = Spec.read(run_folder.spec).code
    with appears_whole(run_folder.code_archive) as partial, tarfile.open(partial, "w:gz", compresslevel=1) as tar:
        if copied is not None:
            code = CodeFolder(name="code", folder=copied.folder, roots=sorted(copied.roots, key=lambda root: root == OURS))
            add_files(tar, code, Path(copied.folder), names_below(Path(copied.folder)))
            found[Path(copied.folder)] = code
        for root in imported_folders() if copied is None else ():
            try:
                _capture(tar, root, found)
            except ConfigError as error:
                top = next((top for top in found if root.is_relative_to(top)), root)
                found.setdefault(top, CodeFolder(name=_free_name(top, found), folder=str(top))).differs["."] = error.happened
    write_json(run_folder.code_list, {"folders": [asdict(code) for code in found.values()]})
    return list(found.values())


def _capture(tar: tarfile.TarFile, root: Path, found: dict[Path, CodeFolder]) -> None:
    """Keep the code of a folder, all of that of its repository, and note it in `found`. Raises ConfigError: git cannot list it."""
    top, names, lister = source_names(root)
    if top not in found and (lister == "git" or root != FOLDER.parent):  # else it lacks our YAML
        found[top] = code = CodeFolder(name=_free_name(top, found), folder=str(top), roots=[str(root.relative_to(top))])
        if lister == "git":
            with suppress(ConfigError):  # it has none yet
                code.commit = git(top, "rev-parse", "HEAD").strip()
        if code.commit is not None:
            changed = git(top, "diff", "--name-only", "--no-renames", "--ignore-submodules", "-z", "HEAD")
            code.changed = sorted({*changed.split("\0")} - {""})
            unchanged = {*git(top, "ls-files", "-z").split("\0")}.difference(code.changed)
            names = (name for name in names if name not in unchanged)
        add_files(tar, code, top, names, max_files=_MAX_FILES[lister])
    elif top in found:
        found[top].roots.append(str(root.relative_to(top)))


def _free_name(top: Path, found: dict[Path, CodeFolder]) -> str:
    return f"{top.name}_{len(found)}" if top.name in {"", *(code.name for code in found.values())} else top.name


def add_files(tar: tarfile.TarFile, code: CodeFolder, top: Path, names: Iterable[str], *, max_files: int = _MAX_CHOSEN) -> None:
    """Add files of a folder without secrets, and note on `code` which they are, what is left out, and what is not what it was."""
    left = max_bytes = max_files * _BYTES_PER_FILE
    for number, name in enumerate(names):
        if number == max_files:
            code.differs["."] = f"only {number:,} of its files are kept"
            return
        path, info = top / name, tarfile.TarInfo(f"{code.name}/{name}")
        try:
            why, status = _why_left_out(path, top, min(left, max_bytes // 10)), path.lstat()
            if path.is_symlink() and not why:
                info.type, info.linkname, text = tarfile.SYMTYPE, os.readlink(path), ""
            else:
                text = "" if why else path.read_bytes().decode("utf-8", "surrogateescape")  # what is no text stays as it is
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            code.differs[name] = f"not kept: {why}"
            continue
        if (clean := redact_code(text)) != text:
            pairs = zip(text.split("\n"), clean.split("\n"), strict=False)
            lines = [str(number) for number, (line, kept) in enumerate(pairs, 1) if line != kept]
            code.differs[name] = f"*** in place of a secret, line {join_few(lines)}"
        content = clean.encode("utf-8", "surrogateescape")
        code.kept[name] = hashlib.sha256(info.linkname.encode() or content).hexdigest()[:8]
        info.size, info.mtime, info.mode = len(content), int(status.st_mtime), 0o755 if status.st_mode & 0o100 else 0o644
        left -= info.size
        tar.addfile(info, io.BytesIO(content))


def _why_left_out(path: Path, top: Path, max_bytes: int) -> str:
    if _SECRET.fullmatch(path.name):
        return "a file of that name holds secrets"
    if path.is_symlink():
        target = os.readlink(path)
        return f"a link to {target}" if os.path.isabs(target) or not path.resolve().is_relative_to(top.resolve()) else ""
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
