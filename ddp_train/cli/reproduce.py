"""`ddp-train reproduce`: train a run once more, with its code, configuration and ranks, and compare the losses."""

import math
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_train.archive import reproduction
from ddp_train.archive.archived_run import ArchivedRun
from ddp_train.archive.compare import compare
from ddp_train.cli.from_python import run_command
from ddp_train.cli.saved_run import PATH, TRUST, ask_trust, parse_words, run_of
from ddp_train.config.command.saved_overrides import with_overrides
from ddp_train.config.spelling import text_of
from ddp_train.config.targets.target import AUTO
from ddp_train.config.tree import changes_results, dotted_items
from ddp_train.errors import DONE, FAILED, ConfigError, DataError
from ddp_train.launch.captured_code import VARIABLES, add_files
from ddp_train.launch.job_runner import JobRunner
from ddp_train.launch.source_copy import git, names_below
from ddp_train.run_folder.claim import claim_new, give_up_claims
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.trust import require_trust
from ddp_train.system.files import appears_whole, write_json

USAGE = """ddp-train reproduce RUN [key=value ...] [--check | --export=FILE.tar.gz]

  RUN            a run folder, or a bundle (FILE.tar.gz): puts its code into a new folder, trains there in a new run folder with the same
                 configuration, ranks and threads, and compares all losses and metrics; the old run stays as it is
  key=value      where things are here: paths (data.root=PATH), cluster.*, and other keys that change no result; debug.max_steps=N
                 compares the first steps only; ~metrics.X removes a metric writer
  --check        only say what differs here, and where it would train; start nothing
  --export=FILE  write a bundle for other people: configuration, code, environment and metrics; no data, no weights, no secrets
  --trust        allow code that another user has written, or that a bundle has, to run as you

Exit code: 0 the same losses bit for bit (--check: nothing differs here); 1 they differ (--check: something does); else as of a run
"""

_CUT = "debug.max_steps"


def reproduce(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train reproduce RUN`: train a run once more and compare it with the first."""
    options, (typed, *overrides) = parse_words(arguments, USAGE, {"--check": "", "--export": "FILE", TRUST: ""}, most=None)
    with tempfile.TemporaryDirectory(prefix="ddp_train_") as scratch:
        folder = Path(scratch, "run")
        if Path(typed).is_file():
            reproduction.unpack(Path(typed), folder)
            if "--check" not in options:
                accept, why = f"ddp-train reproduce {typed} {TRUST}", f"{typed} may come from another user"
                require_trust(folder, key="RUN", accept=accept, is_trusted=TRUST in options, why=why)
        else:
            folder = run_of(Path(typed), key="RUN")
            ask_trust("reproduce", arguments, folder)
        run = ArchivedRun(folder)
        damaged = [problem for problem in run.problems if problem.startswith(("config", "environment"))]
        if damaged or not run.environment or run.folder.evaluation_task.exists():
            happened = "; ".join(damaged) or "it has not begun, or is an evaluation"
            raise ConfigError(key="RUN", happened=f"{typed} cannot be reproduced: {happened}", expected="a run that has begun to train")
        code, changes = reproduction.code_of(run), _changes(run, overrides)
        differing = [*reproduction.changed_code(code), *reproduction.differences(run, reproduction.this_machine())]
        if "--check" in options:
            try:
                reproduction.unpack(run.folder.code_archive, Path(scratch, "code"))
            except DataError as error:
                differing.append(f"code: {error.happened}")
        _print_list("differs here", differing)
        _print_list("set for the new run (the ranks, threads and device of the old one; without what ended it)", changes)
        if "--check" in options:
            print(f"it would train in {_outputs(run)}/DATE")
            print("nothing else differs here; whether the data does is known when it has been read")
            return FAILED if differing else DONE
        for each in filter(attrgetter("commit"), code):
            reproduction.repository_of(each)  # before anything is begun
        if "--export" in options:
            return _export(run, Path(options["--export"]), Path(scratch))
        return _run_again(run, typed, changes, differing)


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"{title}:", *lines, sep="\n    ", flush=True)


def _changes(run: ArchivedRun, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the configuration: typed ones, the ranks and threads of the old run, and its early end."""
    typed = {text.lstrip("~").partition("=")[0]: text for text in overrides}
    cut = typed.pop(_CUT, "").partition("=")[2]
    if wrong := next((key for key in typed if changes_results(key) and not PATH.search(key)), None):
        expected = "paths, cluster.*, and other keys that change no result"
        raise ConfigError(key=wrong, happened="would change what the run computes", expected=expected, fix="a new run, for other results")
    wanted: dict[str, Any] = dict.fromkeys(("after", "cluster.node_rank"))
    wanted |= {"resume": AUTO, "debug.faults": []}
    cluster, ranks = run.config["cluster"], run.environment.get("ranks") or []
    if cluster["launcher"] == "local" and cluster["nodes"] == 1 and ranks:
        device = str(ranks[0]["device"]).partition(" ")[0].partition(":")[0]
        wanted |= {"cluster.processes_per_node": len(ranks), "cluster.threads_per_process": ranks[0]["threads"], "cluster.device": device}
    if cut and not cut.isdecimal():
        raise ConfigError(key=_CUT, happened=f"{cut} is no number of steps", expected="digits alone, such as 1000")
    is_whole = run.result is not None and run.result.status == Status.COMPLETED
    if steps := int(cut) if cut else 0 if is_whole else max((row["step"] for row in run.metrics), default=0):
        # Of a shorter run records are more frequent: their means would be others.
        wanted[_CUT] = max(steps, 20 * run.config["trainer"]["log_every_steps"] - 19)
        if not cut and wanted[_CUT] >= (run.config["trainer"]["max_steps"] or math.inf):
            del wanted[_CUT]  # it would cut nothing off
    present = dict(dotted_items(run.config))
    kept = [f"{key}={text_of(value)}" for key, value in wanted.items() if key not in typed and present.get(key) != value]
    return [*kept, *typed.values()]


def _run_again(run: ArchivedRun, typed: str, changes: Sequence[str], known: Sequence[str]) -> int:
    """Train the run again in a new folder, and return the exit code."""
    new = RunFolder(claim_new((_outputs(run) / time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()))
    here, python_path = reproduction.restore_code(run, new.launch / "restored")
    saved: Any = OmegaConf.to_container(OmegaConf.load(run.folder.config))
    new.record_config(OmegaConf.to_yaml(with_overrides(saved, [*_paths(run, changes, here), *changes], replaced=[run.config])))
    if run.folder.hydra.is_dir():
        shutil.copytree(run.folder.hydra, new.hydra)
    write_json(new.notes, {"reproduces": typed})
    give_up_claims()
    print(f"trains in {new.as_typed()}, with its code in {here}", flush=True)
    variables = {name: str(value) for name, value in (run.environment.get("variables") or {}).items() if VARIABLES.fullmatch(name)}
    others = {name: value for name, value in os.environ.items() if not VARIABLES.fullmatch(name)}
    search = os.pathsep.join(filter(None, [*python_path, os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", "ddp_train", "resume", str(new.root)], {**others, **variables, "PYTHONPATH": search}
    code, report = run_command(command, folder=here, environment=environment)
    print(report.get("error", ""), end="", file=sys.stderr)
    if code != DONE or not new.is_completed():
        print(f"\nnot compared, as it is not done; later: ddp-train runs compare {run.folder.as_typed()} {new.as_typed()}", flush=True)
        return code or FAILED
    again = ArchivedRun(new.root)
    data = compare([run, again]).differences["data"]
    found = [f"{each.name}: {each.values[0]} -> {each.values[1]}" for each in data if None not in each.values]
    print()
    _print_list("differed in this run", [*found, *(line for line in reproduction.differences(run, again) if line not in known)])
    is_same, text = reproduction.compare_losses(run, again)
    print(text, flush=True)
    return DONE if is_same else FAILED


def _outputs(run: ArchivedRun) -> Path:
    return Path("outputs", str(run.config.get("name") or "reproduced"))


def _paths(run: ArchivedRun, changes: Sequence[str], code: Path) -> Iterator[str]:
    """Yield overrides for relative paths of the configuration that lie where the run was started, or here, and not in its code."""
    began, typed = Path(run.environment["working_directory"]), {text.partition("=")[0] for text in changes}
    for key, value in dotted_items(run.config):
        is_path = isinstance(value, str) and value not in ("", AUTO) and ("/" in value or PATH.search(key))
        if not is_path or key in typed or (code / value).is_file():
            continue
        found = next((str((folder / value).absolute()) for folder in (began, Path.cwd()) if (folder / value).exists()), None)
        if found not in (None, value):
            yield f"{key}={text_of(found)}"


def _export(run: ArchivedRun, file: Path, scratch: Path) -> int:
    """Write a bundle: a run folder without data, weights, hosts and the user's home, and with all of the code in its code.tar.gz."""
    if file.exists():
        raise ConfigError(key="--export", happened=f"{file} exists", expected="a new file; nothing is overwritten")
    bundle, restored = RunFolder(scratch / "bundle"), scratch / "code"
    bundle.root.mkdir()
    reproduction.restore_code(run, restored)
    folders = [replace(code, commit=None, changed=[], kept={}) for code in reproduction.code_of(run)]
    with tarfile.open(bundle.code_archive, "w:gz") as tar:
        for code in folders:
            top = restored / code.name
            add_files(tar, code, top, (name for name in names_below(top) if name.split("/")[0] != ".git"))
            if (top / ".git").is_file():
                git(top, "worktree", "remove", "--force", ".")
    write_json(bundle.code_list, {"folders": [asdict(code) for code in folders]})
    ranks = [{**rank, "host": ""} for rank in run.environment.get("ranks") or []]
    write_json(bundle.environment, {**run.environment, "hosts": [], "ranks": ranks})
    for path in (run.folder.config, bundle.environment, bundle.code_list, run.folder.metrics, run.folder.result):
        if path.exists():
            (bundle.root / path.name).write_text(path.read_text().replace(f"{Path.home()}/", "~/"))
    with appears_whole(file.absolute()) as partial, tarfile.open(partial, "w:gz") as tar:
        for path in sorted(bundle.root.iterdir()):
            tar.add(path, path.name, filter=lambda member: member.replace(uid=0, gid=0, uname="", gname="", deep=False))
    _print_list("in the bundle", [*reproduction.changed_code(folders)])
    print(f"{file}, {file.stat().st_size / 2**20:.1f} MiB: ddp-train reproduce {file.name}")
    return DONE
