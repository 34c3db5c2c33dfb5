"""One job: what the composing process decides, and every rank receives unchanged; and when it has to stop."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_train.config.batch_sizes import BatchSizes
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import ClusterConfig
from ddp_train.config.tree import value_at
from ddp_train.errors import UserError
from ddp_train.launch import restart_note
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import read_json, write_json
from ddp_train.system.process_env import is_torchrun_worker


@dataclass(frozen=True, kw_only=True)
class Training:
    checkpoint: str | None = None  # continue from exactly this checkpoint; None: from the newest good one in the run folder, if any


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation of a saved run, or predictions with it, in a folder of its own (`ddp-train evaluate`, `ddp-train predict`)."""

    run: str  # its folder
    checkpoint: str  # one of its checkpoints, also by the names best and last
    predicts: bool = False  # no targets are looked at: what the model says of each sample is written
    watches: bool = False  # every checkpoint, as they come, until the run is done

    @classmethod
    def read(cls, run_folder: RunFolder) -> Evaluation | None:
        """Return the evaluation that a folder was made for; None: a folder of training."""
        return cls(**read_json(run_folder.evaluation_task)) if run_folder.evaluation_task.exists() else None

    def write(self, run_folder: RunFolder) -> None:
        """Mark a folder as an evaluation's: a restart must not train in it."""
        write_json(run_folder.evaluation_task, asdict(self))


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """A program that ranks run instead of a training or an evaluation: nothing is counted or continued, and it leaves only its output."""

    function: str  # its dotted path; each rank calls it


_WORKS = {kind.__name__: kind for kind in (Training, Evaluation, RankProgram)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A frozen config and the folder claimed for it; travels between processes as JSON."""

    config: RunConfig
    run_folder: RunFolder
    command: list[str]
    overrides: list[str]
    options: list[str] = field(default_factory=list)  # where its YAML lies, as it is typed: --config-dir=FOLDER and the like
    in_sweep: bool = False  # then the terminal shows the sweep's table, and the job's own output goes to its logs
    work: Training | Evaluation | RankProgram = Training()

    @property
    def is_resumable(self) -> bool:
        """Whether its folder keeps how it goes, so that it can be started again: a training or an evaluation."""
        return not isinstance(self.work, RankProgram)

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that training continues from, if one was named."""
        return self.work.checkpoint if isinstance(self.work, Training) else None

    @property
    def continues_from(self) -> Path:
        """The checkpoint that was named to continue from, or the run folder."""
        return Path(self.checkpoint or self.run_folder.root)

    def resumed_from(self, continues_from: Path) -> Job:
        """Return the job of a later attempt; an evaluation knows itself how far it is."""
        checkpoint = str(continues_from) if continues_from != self.run_folder.root else None
        return replace(self, work=Training(checkpoint=checkpoint)) if isinstance(self.work, Training) else self

    def hyper_parameters(self) -> dict[str, bool | int | float | str]:
        """Return the typed values of this run, a sweep's too: key -> its value in the config, or for a group the option's name."""
        typed = (text.lstrip("+").partition("=") for text in self.overrides if not text.startswith(("~", "hydra.", "hydra/")))
        values = ((key, value_at(self.config.tree, key), text) for key, _, text in typed)
        return {key: value if isinstance(value, (bool, int, float, str)) else text for key, value, text in values}

    def to_json(self) -> str:
        config = {"tree": self.config.tree, "batch": asdict(self.config.batch), "left_out": self.config.left_out}
        work = {type(self.work).__name__: asdict(self.work)}
        return json.dumps({**vars(self), "config": config, "run_folder": str(self.run_folder.root), "work": work})

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        config = RunConfig.of(fields["config"]["tree"], BatchSizes(**fields["config"]["batch"]), fields["config"]["left_out"])
        [(kind, arguments)] = fields["work"].items()
        run_folder, work = RunFolder(Path(fields["run_folder"])), _WORKS[kind](**arguments)
        return cls(**{**fields, "config": config, "run_folder": run_folder, "work": work})


def stops_at(cluster: ClusterConfig, *, asks_slurm: bool = False) -> float | None:
    """Return the time at which a run has to stop, in seconds since the epoch; None: no limit is known.

    A job of `cluster=slurm` has asked SLURM for its walltime: there SLURM's word counts.
    `asks_slurm`: `scontrol update` may have moved the end since the job began: ask for it. Takes up to the client's time-out.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # seconds since the epoch, in the environment of sbatch and srun
    ends = float(end) if end.isdigit() else None
    if asks_slurm and ends is not None and (job := os.environ.get("SLURM_JOB_ID")):
        from ddp_train.launch.engine import slurm_client  # which a rank needs once, if ever

        with suppress(UserError):  # no client in this container, or a controller that does not answer
            ends = slurm_client.state(job).ends or ends
    limits = [ends] if ends is not None and ends > time.time() else []  # else of another allocation
    if cluster.walltime is not None and not (limits and cluster.launcher == "slurm"):
        started = restart_note.run_started() if is_torchrun_worker() else restart_note.STARTED
        limits.append(started + cluster.walltime)
    return min(limits) - cluster.grace_s if limits else None
