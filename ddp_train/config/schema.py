"""The keys of our own sections, with their types, defaults and ranges. What a `_target_` node takes is its class's signature instead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ddp_train.config.cluster import node_range, seconds_of


@dataclass
class RootConfig:
    """The keys of the root itself."""

    name: str = "default"
    seed: int = field(default=0, metadata={"min": 0})
    deterministic: bool = False
    resume: str = "auto"
    init_from: str | None = None
    init_from_keys: dict[str, str] = field(default_factory=dict)
    init_from_strict: bool = True
    allowed_targets: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    sanity_check: bool = True


@dataclass
class TrainerConfig:
    """The section `trainer`."""

    max_steps: int | None = field(default=None, metadata={"min": 1})
    max_epochs: int | None = field(default=None, metadata={"min": 1})
    global_batch_size: int | None = field(default=None, metadata={"min": 1})
    grad_accum_steps: int | None = field(default=None, metadata={"min": 1})
    clip_grad_norm: float | None = field(default=None, metadata={"above": 0})
    log_every_steps: int = field(default=50, metadata={"min": 1})
    evaluate_every_steps: int | None = field(default=None, metadata={"min": 1})
    on_nonfinite: str = field(default="stop", metadata={"one_of": ("stop", "skip", "rewind")})
    spike_zscore: float | None = field(default=None, metadata={"above": 0})
    on_spike: str = field(default="warn", metadata={"one_of": ("warn", "rewind")})
    check_replicas_every_steps: int | None = field(default=None, metadata={"min": 1})


@dataclass
class EvaluateConfig:
    """The section `evaluate`."""

    save_predictions: bool = False


@dataclass
class CheckpointConfig:
    """The section `checkpoint`."""

    every_evaluation: bool = True
    every_minutes: float | None = field(default=15, metadata={"above": 0})
    every_steps: int | None = field(default=None, metadata={"min": 1})
    asynchronous: bool = True
    keep_last: int = field(default=2, metadata={"min": 1})
    keep_best: int = field(default=0, metadata={"min": 0})
    keep_every_steps: int | None = field(default=None, metadata={"min": 1})
    metric: str | None = None


@dataclass
class ClusterConfig:
    """The section `cluster`."""

    launcher: str = field(default="local", metadata={"one_of": ("local", "torchrun")})
    device: str = field(default="auto", metadata={"one_of": ("auto", "cpu", "cuda")})
    nodes: Any = field(default=1, metadata={"parse": node_range})  # a number or "min:max"
    processes_per_node: int | None = field(default=None, metadata={"min": 1})
    threads_per_process: int | None = field(default=None, metadata={"min": 1})
    node_rank: int | None = field(default=None, metadata={"min": 0})
    rendezvous_endpoint: str | None = None
    rendezvous_backend: str | None = field(default=None, metadata={"one_of": ("c10d", "static")})
    rendezvous_id: str | None = None
    join_timeout_s: int = field(default=300, metadata={"min": 1})
    max_restarts: int | None = field(default=0, metadata={"min": 0})
    grace_s: int = field(default=30, metadata={"min": 1})
    walltime: Any = field(default=None, metadata={"parse": seconds_of})  # minutes or text
    start_timeout_s: float | None = field(default=1800.0, metadata={"above": 0})
    step_timeout_s: float | None = field(default=300.0, metadata={"above": 0})
    env: dict[str, Any] = field(default_factory=dict)


@dataclass
class SweepConfig:
    """The section `sweep`."""

    isolation: str = field(default="warm", metadata={"one_of": ("warm", "process")})
    parallel_jobs: int = field(default=1, metadata={"min": 1})
    on_failure: str = field(default="continue", metadata={"one_of": ("continue", "stop", "retry")})
    max_retries: int = field(default=2, metadata={"min": 1})
    metric: str | None = None
    direction: str | None = field(default=None, metadata={"one_of": ("minimize", "maximize")})


@dataclass
class LoaderConfig:
    """The keys of the section `data` that are ours; the others are arguments of its `_target_`."""

    micro_batch_size: int = field(default=32, metadata={"min": 1})
    eval_batch_size: int | None = field(default=None, metadata={"min": 1})
    num_workers: int = field(default=0, metadata={"min": 0})
    drop_last: bool = False
    on_device: bool = False
    on_bad_sample: str = field(default="raise", metadata={"one_of": ("raise", "skip")})
    fields: list[str] | None = None
    sampling: str = field(default="shuffled", metadata={"one_of": ("shuffled", "weighted", "balanced")})
    sample_weights: str | None = None
    bucket_batches: int | None = field(default=None, metadata={"min": 1})
    eval: dict[str, Any] | None = None


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


@dataclass
class FaultConfig:
    """One item of `debug.faults`."""

    kind: str = field(default="exception", metadata={"one_of": FAULTS})
    rank: int = field(default=0, metadata={"min": 0})
    phase: str = field(default="step", metadata={"one_of": PHASES})
    step: int | None = field(default=None, metadata={"min": 0})  # steps taken before it; None: the first time in this phase
    attempt: Any = field(default=0, metadata={"parse": _attempt})
    seconds: float | None = field(default=None, metadata={"above": 0})


@dataclass
class DebugConfig:
    """The section `debug`."""

    faults: list[Any] = field(default_factory=list)  # of FaultConfig


SECTIONS: dict[str, type] = {
    "trainer": TrainerConfig,
    "evaluate": EvaluateConfig,
    "checkpoint": CheckpointConfig,
    "cluster": ClusterConfig,
    "sweep": SweepConfig,
    "debug": DebugConfig,
}
TARGETS = ("data", "model", "objective", "optimizer", "scheduler", "amp", "strategy")
LOADER_KEYS = tuple(item.name for item in dataclasses.fields(LoaderConfig))
ROOT_KEYS = tuple(item.name for item in dataclasses.fields(RootConfig))
