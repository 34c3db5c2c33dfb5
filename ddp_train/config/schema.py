"""The keys of our own sections, with their types and ranges. What a `_target_` node takes is its class's signature instead.

Their values stand in the YAML alone (conf/); here is no second one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Schema = TypeVar("_Schema")


def node_range(nodes: Any) -> tuple[int, int]:
    """Return the fewest and the most machines that `2` or `1:4` means.

    Raises:
        ValueError: it is neither; the text says what was expected.
    """
    low, colon, high = str(nodes).partition(":")
    numbers = [int(part) for part in (low, high if colon else low) if part.isdigit()]
    if isinstance(nodes, bool) or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError("a number of machines, or MIN:MAX such as 1:4 (in quotes in a YAML)")
    return numbers[0], numbers[1]


def host_and_processes(text: Any) -> tuple[str, int | None]:
    """Return the machine, and the processes on it, that `b:4` or `b` means.

    Raises:
        ValueError: it is neither; the text says what was expected.
    """
    found = re.fullmatch(r"((?:[\w.-]+@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:]+\]))(?::([1-9]\d*))?", str(text), re.ASCII)
    if found is None or str(text).startswith("-"):
        raise ValueError("machines as ssh knows them, each with its number of processes where it has its own: [a,b:4,user@c]")
    name = found[1].replace("[", "").replace("]", "")  # an address with colons, which ssh takes without brackets
    return name, int(found[2]) if found[2] else None


def host_list(hosts: Any) -> list[str]:
    """Return the machines of a run over SSH.

    Raises:
        ValueError: it is no list of them, or one is there twice.
    """
    if not isinstance(hosts, Sequence) or isinstance(hosts, str):
        raise ValueError("a list of machines: [a,b:4,c]")
    names = [host_and_processes(host)[0] for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each machine once; {twice[0]} is there more often")
    return names


def seconds_of(walltime: Any) -> int:
    """Return the seconds that `12:00:00`, `2-00:00:00` or a number of minutes means.

    Raises:
        ValueError: it is none of these; the text says what was expected.
    """
    expected = "HH:MM:SS, D-HH:MM:SS or a number of minutes"
    if isinstance(walltime, int) and walltime >= 3600:  # YAML reads 12:00:00 as 43200; a longer time in minutes has days
        raise ValueError(f'{expected}; in a YAML in quotes: "{walltime // 3600}:{walltime // 60 % 60:02}:{walltime % 60:02}"')
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d))|(\d+)", str(walltime))
    if found is None or isinstance(walltime, bool):
        raise ValueError(expected)
    days, hours, minutes, seconds, whole_minutes = (int(part or 0) for part in found.groups())
    return 60 * (60 * (24 * days + hours) + minutes + whole_minutes) + seconds


def batch_changes(given: Any) -> list[tuple[int, int]]:
    """Return from which step on the global batch has which size, ascending.

    Raises:
        ValueError: it is no such table; the text says what was expected.
    """
    expected = "the first step, counted from 0, and the size from there on: {1000: 128, 5000: 256}"
    if not isinstance(given, Mapping):
        raise ValueError(expected)
    changes = [(int(str(step)) if str(step).isdecimal() else 0, size) for step, size in given.items()]
    if not all(step > 0 and type(size) is int and size > 0 for step, size in changes):
        raise ValueError(f"{expected}; steps and sizes of at least 1. trainer.global_batch_size is the size before them")
    return sorted(changes)


def length_changes(given: Any) -> list[tuple[int, int]]:
    """Return from which step on windows are cut into pieces of which length, ascending.

    Raises:
        ValueError: it is no such table; the text says what was expected.
    """
    expected = "the first step, counted from 0, and the tokens of a piece from there on: {0: 256, 2000: 512, 5000: 1024}"
    if not isinstance(given, Mapping) or not given:
        raise ValueError(expected)
    changes = [(int(str(step)) if str(step).isdecimal() else -1, length) for step, length in given.items()]
    if not all(step >= 0 and type(length) is int and length > 0 for step, length in changes):
        raise ValueError(f"{expected}; lengths of at least 1")
    return sorted(changes)


def micro_batch(given: Any) -> Any:
    """Return how many samples a rank takes at a time: a number, or `auto`.

    Raises:
        ValueError: it is neither; the text says what was expected.
    """
    if given != "auto" and (type(given) is not int or given < 1):
        raise ValueError("at least 1; or auto: as many as fit the device, with trainer.global_batch_size")
    return given


def block_classes(given: Any) -> Any:
    """Return the blocks of a model that a config means: `auto`, or the names of classes.

    Raises:
        ValueError: it is neither; the text says what was expected.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if given != "auto" and not (is_list and all(isinstance(name, str) and name.isidentifier() for name in given)):
        raise ValueError("auto, or the classes of the model's blocks: [Block]")
    return given


def regions(given: Any) -> Any:
    """Return what of a model is compiled piece by piece: `auto`, `whole`, or the names of classes.

    Raises:
        ValueError: it is none of these; the text says what was expected.
    """
    try:
        return given if given == "whole" else block_classes(given)
    except ValueError:
        raise ValueError("auto, whole, or the classes of the model's blocks: [Block]") from None


def run_folders(given: Any) -> list[str]:
    """Return the run folders that a path or a list of paths names.

    Raises:
        ValueError: it is neither; the text says what was expected.
    """
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not found or not all(isinstance(folder, str) and folder for folder in found):
        raise ValueError("a run folder, or several: '[RUN1,RUN2]'; null for none")
    return found


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """The keys of the root itself."""

    name: str
    seed: int = field(metadata={"min": 0})
    deterministic: bool
    resume: str
    after: Any = field(metadata={"parse": run_folders})  # a folder or several
    init_from: str | None
    init_from_keys: dict[str, str]
    init_from_strict: bool
    accept_changed_data: str | None
    extra: dict[str, Any]
    sanity_check: bool
    summary: int = field(metadata={"min": 0})


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The section `trainer`."""

    max_steps: int | None = field(metadata={"min": 1})
    max_epochs: int | None = field(metadata={"min": 1})
    global_batch_size: int | None = field(metadata={"min": 1})
    grad_accum_steps: int | None = field(metadata={"min": 1})
    batch_size_schedule: Any = field(metadata={"parse": batch_changes})  # a step and a size, each
    length_schedule: Any = field(metadata={"parse": length_changes})  # a step and a length, each
    clip_grad_norm: float | None = field(metadata={"above": 0})
    optimizer_in_backward: bool
    log_every_steps: int = field(metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The section `precision`."""

    float32_matmul_precision: str = field(metadata={"one_of": ("highest", "high", "medium")})
    cudnn_benchmark: bool
    channels_last: bool


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """The section `activation_checkpointing`."""

    blocks: Any = field(metadata={"parse": block_classes})  # auto or a list
    every: int = field(metadata={"min": 1})
    save_ops: list[str]


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """The section `compile`."""

    mode: str | None = field(metadata={"one_of": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")})
    regions: Any = field(metadata={"parse": regions})  # auto, whole or a list
    backend: str
    fullgraph: bool
    max_recompiles: int = field(metadata={"min": 1})
    on_failure: str = field(metadata={"one_of": ("stop", "eager")})


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The section `evaluation`."""

    every_steps: int | None = field(metadata={"min": 1})
    batch_size: int = field(metadata={"min": 1})
    max_batches: int | None = field(metadata={"min": 1})
    save_predictions: bool
    metrics: dict[str, Any]  # nodes with a _target_, by the names that their values get; None: left out
    sets: dict[str, Any]  # what differs from the training data, by the names of the sets; None: left out


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """The section `health`."""

    on_nonfinite: str = field(metadata={"one_of": ("stop", "skip", "rewind")})
    spike_zscore: float | None = field(metadata={"above": 0})
    on_spike: str = field(metadata={"one_of": ("warn", "rewind")})
    check_replicas_every_steps: int | None = field(metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The section `profile`."""

    kind: str = field(metadata={"one_of": ("off", "trace", "memory")})
    start_step: int = field(metadata={"min": 0})
    steps: int = field(metadata={"min": 1})
    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The section `checkpoint`."""

    every_evaluation: bool
    every_minutes: float | None = field(metadata={"above": 0})
    every_steps: int | None = field(metadata={"min": 1})
    asynchronous: bool
    keep_last: int = field(metadata={"min": 1})
    keep_best: int = field(metadata={"min": 0})
    keep_every_steps: int | None = field(metadata={"min": 1})
    metric: str | None


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The section `cluster.slurm`."""

    account: str | None
    partition: str | None
    qos: str | None
    reservation: str | None
    constraint: str | None
    dependency: str | None
    exclusive: bool
    cpus_per_node: int | None = field(metadata={"min": 1})
    options: dict[str, Any]
    container: str | None
    container_runtime: str = field(metadata={"one_of": ("pyxis", "apptainer")})
    container_mounts: list[str]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section `cluster`."""

    launcher: str = field(metadata={"one_of": ("local", "machines", "slurm", "ssh")})
    agent: str = field(metadata={"one_of": ("own", "torch")})
    device: str = field(metadata={"one_of": ("auto", "cpu", "cuda")})
    nodes: Any = field(metadata={"parse": node_range})  # a number or "min:max"
    processes_per_node: int | None = field(metadata={"min": 1})
    threads_per_process: int | None = field(metadata={"min": 1})
    node_rank: int | None = field(metadata={"min": 0})
    rendezvous_endpoint: str | None
    rendezvous_id: str | None
    join_timeout_s: int = field(metadata={"min": 1})
    max_restarts: int | None = field(metadata={"min": 0})
    grace_s: int = field(metadata={"min": 1})
    walltime: Any = field(metadata={"parse": seconds_of})  # minutes or text
    start_timeout_s: float | None = field(metadata={"above": 0})
    step_timeout_s: float | None = field(metadata={"above": 0})
    env: dict[str, Any]
    setup: list[str]
    python: str | None
    wait: bool
    code_limit_mib: int = field(metadata={"min": 1})
    slurm: SlurmConfig
    hosts: Any = field(metadata={"parse": host_list})  # a list of "name" and "name:processes"


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The section `sweep`."""

    isolation: str = field(metadata={"one_of": ("warm", "process")})
    parallel_jobs: int = field(metadata={"min": 1})
    on_failure: str = field(metadata={"one_of": ("continue", "stop", "retry")})
    max_retries: int = field(metadata={"min": 1})
    metric: str | None
    direction: str | None = field(metadata={"one_of": ("minimize", "maximize")})


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The section `loader`."""

    micro_batch_size: Any = field(metadata={"parse": micro_batch})  # a number or auto
    num_workers: int = field(metadata={"min": 0})
    drop_last: bool
    on_device: bool
    on_bad_sample: str = field(metadata={"one_of": ("raise", "skip")})
    fields: list[str] | None
    sampling: str = field(metadata={"one_of": ("shuffled", "weighted", "balanced")})
    sample_weights: str | None
    bucket_batches: int | None = field(metadata={"min": 1})
    mixup_alpha: float | None = field(metadata={"above": 0})
    cutmix_alpha: float | None = field(metadata={"above": 0})
    sampler: dict[str, Any] | None
    collate: dict[str, Any] | None


EVERY_ATTEMPT = "every"
FAULTS = (
    *("exception", "kill", "segfault", "exit", "stop", "gil", "loop", "sleep", "deadlock", "sigterm", "sigusr1", "sigusr2", "sigint"),
    *("worker_kill", "worker_stop", "worker_raise", "no_space", "read_only", "truncate", "bit_flip", "missing_file"),
    *("nan", "spike", "drift", "slow"),
)
PHASES = ("start", "data", "step", "evaluation", "save", "end")


def _attempt(value: Any) -> None:
    """Refuse what is neither a number of restarts nor every one."""
    if value != EVERY_ATTEMPT and not (type(value) is int and value >= 0):
        raise ValueError(f"how often the ranks have been started again before, from 0, or {EVERY_ATTEMPT}")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """One item of `debug.faults`. Its keys have defaults: no YAML has such items."""

    kind: str = field(default="exception", metadata={"one_of": FAULTS})
    rank: int = field(default=0, metadata={"min": 0})
    phase: str = field(default="step", metadata={"one_of": PHASES})
    step: int | None = field(default=None, metadata={"min": 0})  # steps taken before it; None: the first time in this phase
    attempt: Any = field(default=0, metadata={"parse": _attempt})
    seconds: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The section `debug`."""

    faults: list[Any]  # FaultConfig, each
    max_steps: int | None = field(metadata={"min": 1})
    resume_after_steps: int | None = field(metadata={"min": 1})
    max_batches: int | None = field(metadata={"min": 1})
    overfit: bool


SECTIONS: dict[str, type] = {
    "loader": LoaderConfig,
    "trainer": TrainerConfig,
    "precision": PrecisionConfig,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "compile": CompileConfig,
    "evaluation": EvaluationConfig,
    "health": HealthConfig,
    "profile": ProfileConfig,
    "checkpoint": CheckpointConfig,
    "cluster": ClusterConfig,
    "sweep": SweepConfig,
    "debug": DebugConfig,
}


def subsection(item: dataclasses.Field[Any]) -> type | None:
    """Return the schema of a key that is a section itself; None for any other."""
    return _SUBSECTIONS.get(str(item.type))


def keys_of(schema: type, prefix: str) -> list[str]:
    """Return the dotted names of a section's keys, those of its own sections too."""
    found = []
    for item in dataclasses.fields(schema):
        found += [f"{prefix}{item.name}", *(keys_of(inner, f"{prefix}{item.name}.") if (inner := subsection(item)) else ())]
    return found


def typed(schema: type[_Schema], values: Mapping[str, Any]) -> _Schema:
    """Return a section that was checked as its dataclass, its own sections too."""
    sections = {item.name: inner for item in dataclasses.fields(schema) if (inner := subsection(item)) is not None}  # type: ignore[arg-type]
    return schema(**{**values, **{name: typed(inner, values[name]) for name, inner in sections.items()}})


_SUBSECTIONS: dict[str, type] = {"SlurmConfig": SlurmConfig}
EVENTS = ("start", "step", "evaluation", "save", "end")
"""Of callbacks (interfaces/run.py)."""

NAMED = {"metrics": "writer", "callbacks": "callback"}
"""Sections that hold one component for each name, and what they hold."""

EVALUATION_METRICS = "evaluation.metrics"
EVALUATION_SETS = "evaluation.sets"
NODES = (*NAMED, EVALUATION_METRICS)
"""Where components stand by names: those sections, and the metrics of the evaluation."""

TARGETS = ("data", "model", "objective", "optimizer", "scheduler", "amp", "strategy")
MADE = (*TARGETS, *NODES, EVALUATION_SETS, "loader.sampler", "loader.collate")
"""Where something is made: all nodes with a `_target_` stand at these keys, or below."""
NODE_KEYS = {"optimizer": ("groups", "layer_decay", "lr_scale", "base_batch_size"), "scheduler": ("every", "metric")}
"""Keys of ours in a node that is made by a class of others; a class that has an argument of that name keeps it."""
OWN_KEYS = {item.name: f"{name}.{item.name}" for name in ("loader", "evaluation", "health") for item in dataclasses.fields(SECTIONS[name])}
"""Where a key of ours stands that is easily taken for an argument of a data set or of the trainer."""
ROOT_KEYS = tuple(item.name for item in dataclasses.fields(RootConfig))
