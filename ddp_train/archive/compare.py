"""What differs between runs: configuration, code, data, environment and results, with the origin of each configured value."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun, read_yaml
from ddp_train.config.tree import leaves
from ddp_train.errors import join_few
from ddp_train.run_folder.result import Status
from ddp_train.run_folder.sweep import REPEATS

_ENVIRONMENT = (
    *("ddp_train", "torch", "python", "cuda", "nccl", "platform", "cpu_capability"),
    *("world_size", "hosts", "batch", "working_directory"),
)
_BY_SEED = {"order: seed", "order: the first samples", "hosts", "working_directory"}  # what differs with the seed, or changes no result


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A fact that is not the same in all runs."""

    name: str
    values: list[Any]  # of each run; None: it has no such fact
    origins: list[str]  # where each came from, for values of the configuration; "": not known


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between some runs, by subject, what they came to, and what a reader should know of it."""

    runs: list[ArchivedRun]
    differences: dict[str, list[Difference]]  # config, code, data, environment
    results: dict[str, list[dict[str, Any]]]  # metric -> last, best and best_step of each run, and last's difference to the first run
    remarks: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        runs = [{"run": str(run.root), "status": run.status, "steps": run.step, "headline": run.headline} for run in self.runs]
        differences = {title: [vars(difference) for difference in found] for title, found in self.differences.items()}
        return {"runs": runs, "differences": differences, "results": self.results, "remarks": self.remarks}


def compare(runs: Sequence[ArchivedRun]) -> Comparison:
    """Compare two or more runs; the first is the one that the others are compared with."""
    subjects: dict[str, Callable[[ArchivedRun], dict[str, Any]]] = {
        "config": lambda run: dict(leaves(run.config)),
        "code": _code,
        "data": lambda run: run.data_identity,
        "environment": environment_facts,
    }
    origins = [origin_of(run) for run in runs]
    differences = {}
    for title, facts_of in subjects.items():
        found = [facts_of(run) for run in runs]
        differences[title] = list[Difference]()
        for name in dict.fromkeys(name for facts in found for name in facts):
            values = [facts.get(name) for facts in found]
            told = [facts.get(name) for facts in found if _is_told(title, name, facts)]
            if any(value != told[0] for value in told):
                came = [origin(name) if title == "config" and name in facts else "" for origin, facts in zip(origins, found, strict=True)]
                differences[title].append(Difference(name=name, values=values, origins=came))
    return Comparison(runs=list(runs), differences=differences, results=_results(runs), remarks=_remarks(runs, differences))


def _is_told(title: str, name: str, facts: dict[str, Any]) -> bool:
    """Tell whether a run says something of a fact: without a checkpoint nothing of its data, without code.tar.gz nothing of its files."""
    return bool(facts) if title == "data" else name in facts or title != "code"


def origin_of(run: ArchivedRun) -> Callable[[str], str]:
    """Return a function that says where a key's value came from, as far as the run's own files tell it."""
    hydra = run.root / ".hydra"
    words = read_yaml(hydra / "overrides.yaml") or run.overrides
    typed = dict(str(word).lstrip("+~").partition("=")[::2] for word in words)
    runtime = ((read_yaml(hydra / "hydra.yaml") or {}).get("hydra") or {}).get("runtime") or {}
    choices = runtime.get("choices") or {}
    experiment = choices.get("experiment")
    files = [Path(source["path"], "experiment", f"{experiment}.yaml") for source in runtime.get("config_sources", ())]
    tree: dict[str, Any] = next(filter(None, map(read_yaml, files)), {})
    by_experiment = {key for key, _ in leaves(tree)}
    by_experiment |= {str(key).split("/")[-1] for item in tree.get("defaults", ()) if isinstance(item, dict) for key in item}
    now, before = dict(leaves(run.config)), dict(leaves(read_yaml(run.root / "config.1.yaml") or run.config))

    def origin(key: str) -> str:
        above = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
        if before.get(key) != now.get(key):
            return "changed by a resume"
        if name := next((name for name in above if name in typed), ""):
            return f"typed: {name}={typed[name]}" if name in choices else "typed"
        if experiment and not tree:
            return f"default or experiment={experiment}, which is no longer there"
        if by_experiment.intersection(above):
            return f"experiment={experiment}"
        if key in run.answered:
            return "auto"
        return "default" if choices else ""

    return origin


def _code(run: ArchivedRun) -> dict[str, Any]:
    git = run.environment.get("git") or {}
    try:
        diff = run.folder.code_diff.read_bytes()
    except OSError:
        diff = b""
    files = re.findall(r"^\+\+\+ b/(.+)$", diff.decode(errors="replace"), re.MULTILINE)
    changes = f"{join_few(files, 4)} ({hashlib.sha256(diff).hexdigest()[:8]})" if diff else "none"
    facts = {"commit": git.get("commit"), "uncommitted changes": changes if git.get("commit") else None}
    with suppress(OSError, EOFError, zlib.error, tarfile.TarError, TypeError, LookupError):  # as far as it was recorded
        folders = run.environment["code"]
        facts["commits of what was imported"] = ", ".join(sorted({str(folder["commit"]) for folder in folders if folder["commit"]}))
        with tarfile.open(run.folder.code_archive) as tar:
            kept = sorted((member.name.partition("/")[2], member.linkname or _hash(tar, member)) for member in tar)
        total = hashlib.sha256(repr((kept, [folder["deleted"] for folder in folders])).encode()).hexdigest()
        facts["files that no commit has"] = f"{join_few([name for name, _ in kept], 4)} ({total[:8]})"
    return facts


def _hash(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return hashlib.file_digest(file, "sha256").hexdigest() if file is not None else ""  # type: ignore[arg-type]


def environment_facts(run: ArchivedRun) -> dict[str, Any]:
    """Return what a run has run on and with, by names for people."""
    ranks = run.environment.get("ranks") or []
    facts = {name: run.environment.get(name) for name in _ENVIRONMENT}
    each = {name: sorted({str(rank.get(key)) for rank in ranks}) for name, key in (("devices", "device"), ("threads of a rank", "threads"))}
    parts = {"package": "packages", "source of": "package_sources", "cpu": "cpu", "variable": "variables"}
    named = {f"{title} {name}": value for title, key in parts.items() for name, value in (run.environment.get(key) or {}).items()}
    return {**facts, **each, **named}


def _results(runs: Sequence[ArchivedRun]) -> dict[str, list[dict[str, Any]]]:
    """Return last, best and the difference to the first run of each metric: the headline first, then those of evaluations."""
    names = dict.fromkeys([run.headline["metric"] for run in runs] + sorted({name for run in runs for name in run.last}))
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name, entries in results.items():
        for run in runs:
            first, last, best = runs[0].last.get(name), run.last.get(name), run.best.get(name) or {}
            difference = last - first if isinstance(last, (int, float)) and isinstance(first, (int, float)) else None
            entries.append({"last": last, "difference": difference, "best": best.get("value"), "best_step": best.get("step")})
    return results


def _remarks(runs: Sequence[ArchivedRun], differences: dict[str, list[Difference]]) -> list[str]:
    """Say what keeps runs from being compared, and what a difference may come from."""
    remarks = [f"{run.folder.as_typed()} is {run.status}, at step {run.step or 0}" for run in runs if run.status != Status.COMPLETED]
    remarks += [f"{run.folder.as_typed()}: {problem}" for run in runs for problem in run.problems]
    if len({tuple(run.headline.values()) for run in runs}) > 1:
        remarks.append("they are judged by different metrics: " + ", ".join(run.headline["metric"] for run in runs))
    if order := [difference.name.removeprefix("order: ") for difference in differences["data"] if difference.name.startswith("order: ")]:
        remarks.append(f"their samples come in a different order ({', '.join(order)})")
    if [difference for difference in differences["data"] if not difference.name.startswith("order: ")]:
        remarks.append("their data differs")
    config = [difference.name for difference in differences["config"]]
    if not config:
        remarks.append("their configurations are the same: what differs in the results comes from code, data, environment or chance")
    elif all(name.rpartition(".")[2] in REPEATS for name in config):
        found = {title: {difference.name for difference in differences[title]} for title in ("code", "data", "environment")}
        others = [title for title, names in found.items() if names - _BY_SEED]
        alone = f"they differ by {', '.join(config)} alone: the difference of their results is chance"
        remarks.append(f"they differ by {', '.join(config)}, and their {', '.join(others)} differs, too" if others else alone)
    return remarks
