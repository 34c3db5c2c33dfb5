"""A run once more: what differs here, its code put back into a folder, and whether the losses are the same."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ddp_train import FOLDER, __version__
from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.compare import environment_facts
from ddp_train.errors import ConfigError, join_few, plural
from ddp_train.launch.captured_code import CodeFolder, ask_git, software
from ddp_train.launch.source_copy import names_below
from ddp_train.system.devices import ask_driver
from ddp_train.system.files import remove
from ddp_train.system.untrusted_tar import unpack

_MEASURED = re.compile(r"time|.*_ms|.*(per_s|seconds|_s)(_per_\w+)?|(device|memory)/.*|mfu|.*flops.*|split|step|epoch|samples")
_ELSEWHERE = ("hosts", "batch", "working_directory")  # which differ without a reason to worry


def this_machine() -> ArchivedRun:
    """Return a run that would be here, of which only the environment is known, as far as it is before ranks start."""
    facts, driver = software(), ask_driver()
    here = ArchivedRun(Path("this machine"))
    devices = [f"cuda ({gpu.name})" for gpu in driver.gpus] if driver is not None else ["cpu"]
    versions = {"ddp_train": __version__, "torch": facts["packages"].get("torch")}
    here.environment = {**facts, **versions, "ranks": [{"device": device} for device in devices]}
    return here


def differences(run: ArchivedRun, other: ArchivedRun) -> list[str]:
    """Name what differs between the environments of two runs; what one of them does not say is not compared."""
    old, new = environment_facts(run), environment_facts(other)
    wanted, found = ({re.sub(r"^cpu.*|:\d+", "", device) for device in facts["devices"]} - {""} for facts in (old, new))
    lines = [f"GPU: {join_few(sorted(wanted))} -> {join_few(sorted(found)) or 'none'}"] if wanted - found else []
    for name in sorted({*old, *new} - {*_ELSEWHERE, "devices"}):
        before, now = (facts.get(name) for facts in (old, new))
        is_known = None not in (before, now) or name.startswith(("package ", "source of ", "variable "))
        if before != now and is_known and now != ["None"]:
            lines.append(f"{name}: {'absent' if before is None else before} -> {'absent' if now is None else now}")
    return lines


def install_line(run: ArchivedRun, here: ArchivedRun) -> str:
    """Return the command that installs the packages of a run that are absent here or of another version; "": there are none."""
    sections = [each.environment.get(key) or {} for each in (run, here) for key in ("packages", "package_sources")]
    versions, sources = sections[:2]
    changed = [name for name in versions if any(sections[part].get(name) != sections[part + 2].get(name) for part in (0, 1))]
    words = [shlex.quote(f"{name} @ {sources[name]}" if name in sources else f"{name}=={versions[name]}") for name in changed]
    build = versions["torch"].partition("+")[2] if "torch" in changed else ""  # cpu, cu126
    index = [f"--extra-index-url https://download.pytorch.org/whl/{build}"] if build else []
    words = [word for word in words if " @ editable " not in word]
    return " ".join(["uv pip install", *index, *words]) if words else ""


def code_of(run: ArchivedRun) -> list[CodeFolder]:
    """Return what environment.json says of the code of a run. Raises ConfigError: an earlier version wrote it, or it is damaged."""
    try:
        folders = [CodeFolder(**folder) for folder in run.environment["code"]]
        Path(run.environment["working_directory"]), [(rank["device"], rank["threads"]) for rank in run.environment.get("ranks", [])]
        is_plain = [Path(code.name).name == code.name and re.fullmatch(r"[0-9a-f]{40,64}|None", str(code.commit)) for code in folders]
        if folders and all(is_plain):
            return folders
    except (KeyError, TypeError):
        pass
    happened = f"{run.folder.as_typed()}/environment.json does not say which code was used"
    raise ConfigError(key="RUN", happened=happened, expected="a run of this version of ddp_train that has begun")


def missing_commits(folders: Sequence[CodeFolder]) -> list[str]:
    """Say which commits are in no repository here, and how to get them."""
    lost = [code for code in folders if code.commit and _repository_of(code) is None]
    how = "in no repository here; in a clone of it type `git fetch {} {}`, and then this command"
    return [f"code {code.name}: commit {code.commit} is {how.format(code.origin or 'REMOTE', code.commit)}" for code in lost]


def changed_code(folders: Sequence[CodeFolder]) -> Iterator[str]:
    """Say where the code that can be put back is not what the run used."""
    for code in folders:
        lines = {name: join_few([*map(str, numbers)]) for name, numbers in code.redacted.items()}
        yield from (f"code {code.name}/{name}: *** in place of a secret, line {numbers}" for name, numbers in lines.items())
        named = {f"/{name}" if name != "." else ": a part of it": why for name, why in code.left_out.items()}
        yield from (f"code {code.name}{name} was not kept: {why}" for name, why in named.items())


def _repository_of(code: CodeFolder) -> Path | None:
    places = [folder for folder in (Path(code.folder), Path.cwd(), FOLDER.parent) if folder.is_dir()]
    return next((folder for folder in places if ask_git(folder, "cat-file", "-t", str(code.commit)) == "commit\n"), None)


def restore_code(run: ArchivedRun, into: Path) -> tuple[Path, list[str]]:
    """Put the code of a run into a new folder; return where in it the run was started, and what Python imports from.

    Raises UserError: a commit is missing, or a file is damaged.
    """
    folders, began = code_of(run), Path(run.environment["working_directory"])
    if missing := missing_commits(folders):
        raise ConfigError(key="RUN", happened="\n    ".join(missing), expected="its code, or a bundle made where that is: --export=FILE")
    unpack(run.folder.code_archive, into)
    for code in folders:
        target, kept = into / code.name, into / f".kept_{code.name}"
        if code.commit:
            target.rename(kept) if target.exists() else None
            command = ["git", "-c", "core.hooksPath=/dev/null", "worktree", "add", "-f", "--detach", str(target), code.commit]
            done = subprocess.run(command, cwd=_repository_of(code), capture_output=True, text=True, errors="replace")
            if done.returncode != 0:
                raise ConfigError(key="RUN", happened=f"git cannot check out {code.commit} of {code.folder}: {done.stderr.strip()}")
            for name in code.deleted:
                remove(_inside(target, name))
            for name in [*names_below(kept)]:
                remove(changed := _inside(target, name))
                changed.parent.mkdir(parents=True, exist_ok=True)
                (kept / name).rename(changed)
            remove(kept)
        else:
            into.mkdir(parents=True, exist_ok=True)
            ask_git(into, "init", "--quiet", str(target))  # of its own, should it lie in another one: the new run keeps its code, too
    found = [(code, began.relative_to(code.folder)) for code in folders if began.is_relative_to(code.folder)]
    here = into / found[0][0].name / found[0][1] if found else into
    here.mkdir(parents=True, exist_ok=True)
    return here, [str(path) for code in folders for root in code.roots if (path := into / code.name / root).is_dir() and path != here]


def _inside(top: Path, name: str) -> Path:
    path = top / name
    if not path.parent.resolve().is_relative_to(top.resolve()) or Path(name).name in ("", ".."):
        raise ConfigError(key="RUN", happened=f"{name} leads out of the code of the run")
    return path


def compare_losses(old: ArchivedRun, new: ArchivedRun) -> tuple[bool, str]:
    """Compare all values but measured times, up to where the first of two runs ends; tell whether they are the same, and a line.

    What the new run alone has of its last step does not count: it may end earlier, and a run evaluates at its end.
    """
    mine, theirs = (
        {(row["step"], row["split"], name): value for row in run.metrics for name, value in row.items() if not _MEASURED.fullmatch(name)}
        for run in (old, new)
    )
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return False, "the two runs have no record in common"
    last, records = min(max(mine)[0], max(theirs)[0]), {place[:2] for place in common}
    lacks = [(*place, "new") for place in mine.keys() - theirs.keys() if place[0] <= last]
    lacks += [(*place, "old") for place in theirs.keys() - mine.keys() if place[0] < last]
    absent = [f"the {name} run has no {where}/{what} of step {at}" for at, where, what, name in sorted(lacks)[:1]]
    if not any(place[1:] == ("train", "loss") and _is_finite(mine[place]) for place in common):
        absent.append("no finite train/loss is among them")
    how_many = "; ".join([f"{plural(len(records), 'record')} up to step {last}", *absent])
    if not (unequal := [place for place in common if mine[place] != theirs[place]]):
        return not absent, f"{'not all could be compared' if absent else 'the same losses bit for bit'}: {how_many}"
    step, split, name = unequal[0]
    most, (at, where, what) = max((_relative(mine[place], theirs[place]), place) for place in unequal)
    first = f"the losses differ from step {step} on: {split}/{name} {mine[unequal[0]]} -> {theirs[unequal[0]]}"
    return False, f"{first}; at most by {most:.2g} of the value ({where}/{what}, step {at}); {how_many}"


def _relative(left: Any, right: Any) -> float:
    return abs(left - right) / abs(left) if _is_finite(left) and _is_finite(right) and left else inf


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)
