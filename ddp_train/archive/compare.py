"""Differences of runs in configuration, code, data, environment and results, with the origin of each configured value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.archive.archived_run import ArchivedRun, read_yaml
from ddp_train.config.tree import leaves
from ddp_train.errors import join_few

_ENVIRONMENT = (
    *("ddp_train", "torch", "python", "cuda", "nccl", "platform", "cpu_capability"),
    *("world_size", "hosts", "batch", "working_directory"),
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    values: list[Any]  # of each run; None: it has no such fact
    origins: list[str]  # where each came from, for values of the configuration; "": not known


@dataclass(frozen=True, kw_only=True)
class Comparison:
    runs: list[str]  # their folders
    differences: dict[str, list[Difference]]  # config, code, data, environment
    results: dict[str, list[dict[str, Any]]]  # metric, and seconds -> last, best, best_step of each run, last's difference to the first run


def compare(runs: Sequence[ArchivedRun]) -> Comparison:
    """Compare two or more runs; the first is the one that the others are compared with."""
    subjects: dict[str, Callable[[ArchivedRun], dict[str, Any]]] = {
        "config": lambda run: dict(leaves(run.config, in_lists=False)),
        "code": _code,
        "data": lambda run: run.data_identity,
        "environment": environment_facts,
    }
    origins = [origin_of(run) for run in runs]
    differences: dict[str, list[Difference]] = {subject: [] for subject in subjects}
    for subject, facts_of in subjects.items():
        found = [facts_of(run) for run in runs]
        for name in dict.fromkeys(name for facts in found for name in facts):
            values = [facts.get(name) for facts in found]
            # A run that has saved no checkpoint or kept no code says nothing of them.
            known = [facts[name] for facts in found if name in facts] if subject in ("code", "data") else values
            if any(value != known[0] for value in known):
                came = [origin(name) if subject == "config" else "" for origin in origins]
                differences[subject].append(Difference(name=name, values=values, origins=came))
    metrics = dict.fromkeys([*(run.headline["metric"] for run in runs), *sorted({name for run in runs for name in run.last}), "seconds"])
    results = {metric: [_result(run, runs[0], metric) for run in runs] for metric in metrics}
    return Comparison(runs=[str(run.root) for run in runs], differences=differences, results=results)


def origin_of(run: ArchivedRun) -> Callable[[str], str]:
    """Return a function that says where a key's value came from, as far as the run's own files tell it."""
    hydra = run.folder.hydra
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
        if key not in now:
            return ""
        if before.get(key) != now[key]:
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
    """Return the commits of a run's code, and the files that no commit has by names and hash; an engine's copy has all files."""
    facts = dict[str, Any]()
    if commits := sorted({code.commit[:12] for code in run.code if code.commit}):
        facts["commits"] = ", ".join(commits)
    if run.code:
        kept = {name: text for code in run.code for name, text in {**dict.fromkeys(code.changed, "deleted"), **code.kept}.items()}
        digest = hashlib.sha256(repr(sorted(kept.items())).encode()).hexdigest()[:8]
        facts["files that no commit has" if commits else "files"] = f"({digest}) {join_few(sorted(kept), 4)}" if kept else "none"
    return facts


def environment_facts(run: ArchivedRun) -> dict[str, Any]:
    """Return the environment of a run, by names for people."""
    ranks = run.environment.get("ranks") or []
    facts = {name: run.environment.get(name) for name in _ENVIRONMENT}
    each = {name: sorted({str(rank.get(key)) for rank in ranks}) for name, key in (("devices", "device"), ("threads of a rank", "threads"))}
    parts = {"package": "packages", "source of": "package_sources", "cpu": "cpu", "variable": "variables"}
    named = {f"{title} {name}": value for title, key in parts.items() for name, value in (run.environment.get(key) or {}).items()}
    return {**facts, **each, **named}


def _result(run: ArchivedRun, first: ArchivedRun, metric: str) -> dict[str, Any]:
    last, other = (each.last.get(metric) if metric != "seconds" else getattr(each.result, metric, None) for each in (run, first))
    best = run.best.get(metric) or {}
    difference = last - other if isinstance(last, (int, float)) and isinstance(other, (int, float)) else None
    return {"last": last, "difference": difference, "best": best.get("value"), "best_step": best.get("step")}
