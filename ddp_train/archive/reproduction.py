"""Reproduction of a run: the differences of this machine, its code put back into a folder, and a comparison of the losses."""

import platform
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ddp_train import FOLDER, __version__
from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.compare import environment_facts
from ddp_train.errors import ConfigError, DataError, plural
from ddp_train.launch.captured_code import CodeFolder, software
from ddp_train.launch.source_copy import git
from ddp_train.system.devices import ask_driver

_MEASURED = re.compile(r"time|.*_ms|.*(per_s|seconds|_s)(_per_\w+)?|(device|memory)/.*|mfu|.*flops.*|split|step|epoch|samples")
_ELSEWHERE = ("hosts", "batch", "working_directory")  # which differ without a reason to worry
_MAX_MEMBERS, _MAX_BYTES = 200_000, 2 << 30  # of an archive


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar.gz of unknown origin: plain files, folders, and links that stay inside. DataError: it is damaged, or has more."""
    members, size = list[tarfile.TarInfo](), 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                members.append(tarfile.data_filter(member, str(into)))
                size += member.size
                if not (member.isreg() or member.isdir() or member.issym()) or len(members) > _MAX_MEMBERS or size > _MAX_BYTES:
                    raise tarfile.TarError(f"{member.name!r} is no plain file, or there are more than {_MAX_MEMBERS:,} files or 2 GiB")
            links = {PurePosixPath(member.name) for member in members if member.issym()}
            for path in (PurePosixPath(member.name) for member in members):
                if ".." in path.parts or not links.isdisjoint(path.parents):
                    raise tarfile.TarError(f"'{path}' leads out of the folder, or through a link")
            members.sort(key=tarfile.TarInfo.issym)  # links last: no file of the same name is written through one
            tar.extractall(into, members, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, ValueError, OSError) as error:
        expected = "what `ddp-train reproduce RUN --export=FILE` has written"
        raise DataError(happened=f"{archive} is not used: {error}", expected=expected) from None


def this_machine() -> ArchivedRun:
    """Return a run that would be here, of which only the environment is known, as far as it is before ranks start."""
    facts, driver = software(), ask_driver()
    here = ArchivedRun(Path("this machine"))
    devices = [f"cpu ({platform.machine()})", *(f"cuda:{index} ({name})" for index, name in enumerate(driver.gpus if driver else ()))]
    versions = {"ddp_train": __version__, "torch": facts["packages"].get("torch")}
    here.environment = {**facts, **versions, "ranks": [{"device": device} for device in devices]}
    return here


def differences(run: ArchivedRun, other: ArchivedRun) -> list[str]:
    """Name the differences of the environments of two runs; facts that one of them lacks are not compared."""
    old, new = environment_facts(run), environment_facts(other)
    lines = [f"device: {device} is absent" for device in old["devices"] if device not in new["devices"]]
    for name in sorted({*old, *new} - {*_ELSEWHERE, "devices"}):
        before, now = (facts.get(name) for facts in (old, new))
        is_known = None not in (before, now) or name.startswith(("package ", "source of ", "variable "))
        if before != now and is_known and now != ["None"]:
            lines.append(f"{name}: {'absent' if before is None else before} -> {'absent' if now is None else now}")
    return lines


def code_of(run: ArchivedRun) -> list[CodeFolder]:
    """Return the folders with the code of a run. Raises ConfigError: they, or where it was started, are not known."""
    if run.code and "working_directory" in run.environment:
        return run.code
    another = "environment.json or code.json is damaged, or of another version of ddp_train"
    why = another if run.folder.code_list.exists() else "the run ended before its code was kept"
    raise ConfigError(key="RUN", happened=f"{run.folder.as_typed()} cannot be reproduced: {why}", expected="a run with a code.json")


def changed_code(folders: list[CodeFolder]) -> Iterator[str]:
    """Describe where the code that can be put back here differs from the run's."""
    for code in folders:
        try:
            if code.commit:
                repository_of(code)
        except ConfigError as error:
            yield f"code {code.name}: {error.happened}"
        yield from (f"code {Path(code.name, name)}: {how}" for name, how in code.differs.items())


def repository_of(code: CodeFolder) -> Path:
    """Return a folder of a repository here that has the commit. Raises ConfigError: there is none."""
    for folder in (Path(code.folder), Path.cwd(), FOLDER.parent):
        with suppress(ConfigError):
            git(folder, "cat-file", "-e", f"{code.commit}^{{commit}}")
            return folder
    expected = f"a clone of {code.name} as the current folder (there: `git fetch REMOTE {code.commit}`), or a bundle: --export=FILE"
    raise ConfigError(key="RUN", happened=f"commit {code.commit} is in no repository here", expected=expected)


def restore_code(run: ArchivedRun, into: Path) -> tuple[Path, list[str]]:
    """Put the code of a run into a new folder; return where in it the run was started, and what Python imports from.

    Raises UserError: a commit is missing, or a file is damaged.
    """
    folders = code_of(run)
    for code in folders:
        target = into / code.name
        if code.commit is None:
            target.mkdir(parents=True)
            git(target, "init", "--quiet")  # of its own, should it lie in another one: the new run keeps its code, too
            continue
        git(repository_of(code), "worktree", "add", "-f", "--detach", str(target), code.commit, within_s=None)
        if code.changed:
            words = ("rm", "-rfq", "--ignore-unmatch", "--pathspec-from-file=-", "--pathspec-file-nul")
            git(target, "--literal-pathspecs", *words, given="\0".join(code.changed))
            git(target, "reset", "--quiet")
    unpack(run.folder.code_archive, into)
    here, *others = [into / code.name / root for code in folders for root in code.roots] or [into]
    here.mkdir(parents=True, exist_ok=True)
    return here, [str(path) for path in others if path.is_dir()]


def compare_losses(old: ArchivedRun, new: ArchivedRun) -> tuple[bool, str]:
    """Compare all values but measured times, up to where the first of two runs ends; tell whether they are the same, and a line.

    What the new run alone has of its last step does not count: it may end earlier, and a run evaluates at its end.
    """
    mine, theirs = (
        {(row["step"], row["split"], name): value for row in run.metrics for name, value in row.items() if not _MEASURED.fullmatch(name)}
        for run in (old, new)
    )
    if not (common := sorted(mine.keys() & theirs.keys())):
        return False, "the two runs have no record in common"
    last = min(max(mine)[0], max(theirs)[0])
    how_many = f"{plural(len({place[:2] for place in common}), 'record')} up to step {last}"
    for place in common:
        if mine[place] != theirs[place]:
            step, split, name = place
            return False, f"the losses differ from step {step} on: {split}/{name} {mine[place]} -> {theirs[place]}; {how_many}"
    lacks = [(*place, "new") for place in mine.keys() - theirs.keys() if place[0] <= last]
    lacks += [(*place, "old") for place in theirs.keys() - mine.keys() if place[0] < last]
    for step, split, name, which in sorted(lacks):
        return False, f"not all could be compared: {how_many}; the {which} run has no {split}/{name} of step {step}"
    if all(mine[place] is None for place in common if place[1:] == ("train", "loss")):
        return False, f"not all could be compared: {how_many}; no finite train/loss is among them"
    return True, f"the same losses bit for bit: {how_many}"
