"""The keys of our own sections, with their types and ranges. The schema of a component is its class's signature instead.

Default values are in the YAML alone (conf/).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddp_train.config import values

_Schema = TypeVar("_Schema")


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """The keys of the root itself."""

    name: str
    seed: int = field(metadata={"min": 0})
    deterministic: bool
    resume: str
    after: tuple[str, ...] | None = field(metadata={"parse": values.run_folders})  # run folders
    init_from: str | None
    init_from_keys: dict[str, str]
    init_from_strict: bool
    accept_changed_data: str | None
    extra: dict[str, Any]
    sanity_check: bool
    summary: int = field(metadata={"min": 0})


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    max_steps: int | None = field(metadata={"min": 1})
    max_epochs: int | None = field(metadata={"min": 1})
    global_batch_size: int | None = field(metadata={"min": 1})
    grad_accum_steps: int | None = field(metadata={"min": 1})
    batch_size_schedule: tuple[values.StepChange, ...] | None = field(metadata={"parse": values.batch_changes})
    length_schedule: tuple[values.StepChange, ...] | None = field(metadata={"parse": values.length_changes})
    clip_grad_norm: float | None = field(metadata={"above": 0})
    optimizer_in_backward: bool
    log_every_steps: int = field(metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    float32_matmul_precision: Literal["highest", "high", "medium"]
    cudnn_benchmark: bool
    channels_last: bool


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    blocks: str | Sequence[str] | None = field(metadata={"parse": values.block_classes})  # auto or names of classes
    every: int = field(metadata={"min": 1})
    save_ops: list[str]


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", None]
    regions: str | Sequence[str] = field(metadata={"parse": values.regions})  # auto, whole or names of classes
    backend: str
    fullgraph: bool
    max_recompiles: int = field(metadata={"min": 1})
    on_failure: Literal["stop", "eager"]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every_steps: int | None = field(metadata={"min": 1})
    batch_size: int = field(metadata={"min": 1})
    max_batches: int | None = field(metadata={"min": 1})
    save_predictions: bool
    metrics: dict[str, Any]  # components, by the names that their values get; None: left out
    sets: dict[str, Any]  # what differs from the training data, by the names of the sets; None: left out


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    on_nonfinite: Literal["stop", "skip", "rewind"]
    spike_zscore: float | None = field(metadata={"above": 0})
    on_spike: Literal["warn", "rewind"]
    check_replicas_every_steps: int | None = field(metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    kind: Literal["off", "trace", "memory"]
    start_step: int = field(metadata={"min": 0})
    steps: int = field(metadata={"min": 1})
    ranks: list[int]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
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
    container_runtime: Literal["pyxis", "apptainer"]
    container_mounts: list[str]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    launcher: Literal["local", "machines", "slurm", "ssh"]
    agent: Literal["own", "torch"]
    device: Literal["auto", "cpu", "cuda"]
    nodes: values.NodeRange | None = field(metadata={"parse": values.node_range})
    processes_per_node: int | None = field(metadata={"min": 1})
    threads_per_process: int | None = field(metadata={"min": 1})
    node_rank: int | None = field(metadata={"min": 0})
    rendezvous_endpoint: str | None
    rendezvous_id: str | None
    join_timeout_s: int = field(metadata={"min": 1})
    max_restarts: int | None = field(metadata={"min": 0})
    grace_s: int = field(metadata={"min": 1})
    walltime: int | None = field(metadata={"parse": values.seconds_of})  # in seconds
    start_timeout_s: float | None = field(metadata={"above": 0})
    step_timeout_s: float | None = field(metadata={"above": 0})
    env: dict[str, Any]
    setup: list[str]
    python: str | None
    wait: bool
    code_limit_mib: int = field(metadata={"min": 1})
    slurm: SlurmConfig = field(metadata={"section": SlurmConfig})
    hosts: tuple[values.Host, ...] | None = field(metadata={"parse": values.host_list})


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    parallel_jobs: int = field(metadata={"min": 1})
    on_failure: Literal["continue", "stop", "retry"]
    max_retries: int = field(metadata={"min": 1})
    metric: str | None
    direction: Literal["minimize", "maximize", None]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    micro_batch_size: int | Literal["auto"] = field(metadata={"parse": values.micro_batch})
    num_workers: int = field(metadata={"min": 0})
    drop_last: bool
    on_device: bool
    on_bad_sample: Literal["raise", "skip"]
    fields: list[str] | None
    sampling: Literal["shuffled", "weighted", "balanced"]
    sample_weights: str | None
    bucket_batches: int | None = field(metadata={"min": 1})
    mixup_alpha: float | None = field(metadata={"above": 0})
    cutmix_alpha: float | None = field(metadata={"above": 0})
    sampler: dict[str, Any] | None
    collate: dict[str, Any] | None


_OfProcess = Literal["exception", "kill", "segfault", "exit", "stop", "gil", "loop", "sleep", "deadlock", "slow"]
_OfSignal = Literal["sigterm", "sigusr1", "sigusr2", "sigint"]
_OfLoader = Literal["worker_kill", "worker_stop", "worker_raise"]
_OfDisk = Literal["no_space", "read_only", "truncate", "bit_flip", "missing_file"]
_OfNumbers = Literal["nan", "spike", "drift"]
Fault = Literal[_OfProcess, _OfSignal, _OfLoader, _OfDisk, _OfNumbers]


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """One item of `debug.faults`. Its keys have defaults: no YAML has such items."""

    kind: Fault = "exception"
    rank: int = field(default=0, metadata={"min": 0})
    phase: Literal["start", "data", "step", "evaluation", "save", "end"] = "step"
    step: int | None = field(default=None, metadata={"min": 0})  # steps taken before it; None: the first time in this phase
    attempt: int | str = field(default=0, metadata={"parse": values.attempt_number})  # a number or every
    seconds: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    faults: list[Any] = field(metadata={"items": FaultConfig})
    max_steps: int | None = field(metadata={"min": 1})
    max_batches: int | None = field(metadata={"min": 1})
    overfit: bool


@dataclass(frozen=True, kw_only=True)
class Sections:
    """What a configuration consists of beside the keys of its root: our own sections, and the components of each run."""

    loader: LoaderConfig
    trainer: TrainerConfig
    precision: PrecisionConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig
    evaluation: EvaluationConfig
    health: HealthConfig
    profile: ProfileConfig
    checkpoint: CheckpointConfig
    cluster: ClusterConfig
    sweep: SweepConfig
    debug: DebugConfig

    data: dict[str, Any]  # the data set's arguments, and `eval`: the different ones for evaluation, or None
    model: dict[str, Any]
    objective: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    amp: dict[str, Any]
    strategy: dict[str, Any]


SECTIONS: dict[str, type] = {name: kind for name, kind in get_type_hints(Sections).items() if isinstance(kind, type)}
TARGETS = tuple(item.name for item in dataclasses.fields(Sections) if item.name not in SECTIONS)


types_of = cache(get_type_hints)  # of the keys of a schema


def subsection(item: dataclasses.Field[Any]) -> type | None:
    """Return the schema of a key that is a section itself; None for any other."""
    return item.metadata.get("section")


def keys_of(schema: type, prefix: str) -> list[str]:
    """Return the dotted names of a section's keys, those of inner sections too."""
    names = []
    for item in dataclasses.fields(schema):
        names += [f"{prefix}{item.name}", *(keys_of(inner, f"{prefix}{item.name}.") if (inner := subsection(item)) else ())]
    return names


def as_dataclass(schema: type[_Schema], section: Mapping[str, Any]) -> _Schema:
    """Return a checked section as its dataclass: inner sections too, and values with several forms as their parsers return them."""
    converted = dict(section)
    for item in dataclasses.fields(schema):  # type: ignore[arg-type]
        inner, value = subsection(item), section.get(item.name)
        parse = item.metadata.get("parse") if inner is None else partial(as_dataclass, inner)
        if "items" in item.metadata:
            converted[item.name] = [as_dataclass(item.metadata["items"], each) for each in section[item.name]]
        elif value is not None and parse is not None:
            converted[item.name] = parse(value)
    return schema(**converted)


@cache
def choices_of(schema: type) -> dict[str, tuple[str, ...]]:
    """Return the words of each key that takes one of some."""
    hints = {name: hint for name, hint in types_of(schema).items() if get_origin(hint) is Literal}
    return {name: tuple(word for word in get_args(hint) if word is not None) for name, hint in hints.items()}


def describe(schema: type, item: dataclasses.Field[Any]) -> str:
    """Return the type and the range of a key as people read them: `int or null, at least 1`; "": it is a section itself."""
    rule, kind, choices = item.metadata, str(item.type), choices_of(schema).get(item.name, ())
    if choices:
        kind = "str | None" if None in get_args(types_of(schema)[item.name]) else "str"
    parts = [] if "parse" in rule or subsection(item) is not None else [kind.replace(" | None", " or null")]
    parts += [*values.range_of(rule), *([f"one of {', '.join(choices)}"] if choices else [])]
    if "parse" in rule:
        try:
            rule["parse"](object())
        except ValueError as error:
            parts.append(str(error))
    return ", ".join(parts)


@cache
def as_written(schema: type) -> type:
    """Return the schema of a section as OmegaConf knows types: a key with a parser takes any value, one of some words any text."""
    types = dict(types_of(schema))
    types |= {name: str | None if None in get_args(types[name]) else str for name in choices_of(schema)}
    types |= {item.name: Any for item in dataclasses.fields(schema) if "parse" in item.metadata or subsection(item) is not None}
    fields = [(item.name, types[item.name], field(default=item.default)) for item in dataclasses.fields(schema)]
    return dataclasses.make_dataclass(schema.__name__, fields, init=False, repr=False, eq=False, match_args=False)


EVENTS = ("on_start", "on_step", "on_evaluation", "on_save", "on_end")  # of `interfaces.Callback`, which imports torch
NAMED = {"metrics": "writer", "callbacks": "callback"}  # sections with one component for each name -> what they hold

EVALUATION_METRICS = "evaluation.metrics"
EVALUATION_SETS = "evaluation.sets"
COMPONENTS_BY_NAME = (*NAMED, EVALUATION_METRICS)  # sections with components by name: those, and the metrics of the evaluation

COMPONENT_KEYS = (*TARGETS, *COMPONENTS_BY_NAME, EVALUATION_SETS, "loader.sampler", "loader.collate")
"""Keys at which, or below which, all components are."""
KEYS_BESIDE_ARGUMENTS = {"optimizer": ("groups", "layer_decay", "lr_scale", "base_batch_size"), "scheduler": ("every", "metric")}
"""Our keys in the config of a third-party component; an argument of the class with that name takes precedence."""
FULL_KEYS = {item.name: f"{name}.{item.name}" for name in ("loader", "evaluation", "health") for item in dataclasses.fields(SECTIONS[name])}
"""The full key of names that are easily mistaken for arguments of a data set or of the trainer."""
ROOT_KEYS = tuple(item.name for item in dataclasses.fields(RootConfig))
