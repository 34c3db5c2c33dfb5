"""Every path of a run. The composing process writes the config before any rank exists."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Result, Status
from ddp_train.system.files import earlier_copy, write_atomic

MANIFEST, COMPLETE = "manifest.json", "COMPLETE"  # in the folder of a checkpoint
_STEP_FOLDER = re.compile(r"step_\d{8,12}")
SWEEP_FILE = "sweep.json"  # in the folder of a sweep (`run_folder.sweep`)


def step_folder(step: int) -> str:
    """Return the name of the folder of a step: its checkpoint, or its predictions."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step of such a folder (ValueError: it has another name)."""
    return int(folder.name.removeprefix("step_"))


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return each such folder in another one, after its step: the folder of the earliest step first."""
    return sorted((step_of(path), path) for path in folder.glob("step_*") if _STEP_FOLDER.fullmatch(path.name))


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


@dataclass
class RunFolder:
    """The paths below one run folder. To make one touches nothing: the folder may not be there."""

    root: Path

    def __post_init__(self) -> None:
        self.config = self.root / "config.yaml"
        self.hydra = self.root / ".hydra"  # how it was composed, as Hydra writes it
        self.environment = self.root / "environment.json"
        self.code_list = self.root / "code.json"  # what Python imports (`launch.captured_code`)
        self.code_archive = self.root / "code.tar.gz"  # files of it that no commit has
        self.metrics = self.root / "metrics.jsonl"
        self.events = self.root / "events.jsonl"  # non-finite losses, spikes, skipped steps and steps that were undone; a line each
        self.times = self.root / "times.jsonl"  # where the time went (`run_folder.times`)
        self.logs = self.root / "logs"
        self.batches = self.logs / "batches"  # how far an evaluation is (`run_folder.progress`)
        self.checkpoints = self.root / "checkpoints"
        self.profile = self.root / "profile"  # recordings of a step's time or memory
        self.profile_request = self.root / "profile.request"  # asks for a recording (`training/profile.py`)
        self.compiled = self.root / "compiled"  # torch.compile's cache; the jobs of a sweep have one in the sweep's folder
        self.predictions = self.root / "predictions"
        self.evaluations = self.root / "evaluations"  # later ones of the run's checkpoints, each in a folder like this one
        self.evaluation_task = self.root / "task.json"  # in such a folder: the run and the checkpoint (`ddp_train/launch/job.py`)
        self.starts = self.root / "starts.json"  # since the newest checkpoint (`run_folder.starts`)
        self.failure = self.root / "failure.json"
        self.result = self.root / "result.json"
        self.notes = self.root / "notes.json"  # of people: tags, a note; and which run it repeats
        self.doctor = self.root / "doctor.json"  # result of an examination instead of a run (`doctor.checkup`)
        self.launch = self.root / "launch"  # only of a run that an engine starts: the files for it
        self.spec = self.launch / "spec.json"
        self.code = self.launch / "code"
        self.submitted = self.launch / "submitted.json"
        self.cancelled = self.launch / "cancelled.json"  # `ddp-train cancel`: it is not started again
        self.continued = self.launch / "continued"  # exists when the checkpoint that the spec begins with has been loaded

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> Self:
        return cls(checkpoint.parent.parent)

    def has_continued(self) -> bool:
        """Tell whether the run has loaded the checkpoint that it was submitted with."""
        with suppress(OSError):
            return self.continued.stat().st_mtime >= self.spec.stat().st_mtime
        return False

    def run_id(self) -> str | None:
        """Return the run's unique id, which stays when the folder moves; None: environment.json has none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self.environment.read_text())["run"])
        return None

    def meeting(self, launch_id: str) -> Path:
        """Return the file with the address and port of the registry, on the first machine, of one launch."""
        return self.launch / f"meeting_{launch_id}.json"

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return [step for step, path in step_folders(self.checkpoints) if (path / COMPLETE).exists()]

    def resume_point_text(self) -> str:
        """Say from which step the run continues; the newest checkpoint may still turn out damaged."""
        steps = self.saved_steps()
        return f"from step {steps[-1]}" if steps else "from the start"

    def predictions_of(self, step: int, set_name: str = "") -> Path:
        """Return the folder of the per-sample outputs of the evaluation after a step (`evaluation.save_predictions=true`)."""
        return self.predictions / set_name / step_folder(step)

    def record_config(self, text: str) -> None:
        """Write config.yaml; a different one before it (of an attempt with other settings) stays as config.1.yaml, config.2.yaml, ..."""
        present = self.config.read_text() if self.config.exists() else None
        if present not in (None, text):
            os.link(self.config, earlier_copy(self.config))  # there is a config.yaml at any time
        if present != text:
            write_atomic(self.config, text)

    def archive_failure(self) -> None:
        """Rename failure.json of an earlier attempt (reports are numbered), and remove its result.json unless it completed."""
        if self.failure.exists():
            self.failure.rename(earlier_copy(self.failure))
        if not self.is_completed():
            self.result.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Let the run go on because a person asks: archive its failure, and forget that it was cancelled.

        The order: lock the folder; check what is to run; reopen; `AttemptCount.close_unfinished`, which may refuse; begin. What goes on by
        itself only archives: ranks that start again, a further try of a sweep, an engine's machines.
        """
        self.archive_failure()
        self.cancelled.unlink(missing_ok=True)

    def read_result(self) -> Result | None:
        """Return the content of result.json; None: it is missing or damaged."""
        return Result.read(self.result)

    def is_completed(self) -> bool:
        """Tell whether the run has completed, by its result.json; a damaged one counts as no."""
        result = self.read_result()
        return result is not None and result.status == Status.COMPLETED

    def has_ended_since(self, before: Result | None) -> bool:
        """Tell whether the run has completed, or stopped in good order, since result.json held `before`.

        A rank that dies after that is no failure. But a completed run may be continued, and fail then.
        """
        result = self.read_result()
        return result is not None and result != before and result.status in (Status.COMPLETED, *EXIT_CODE_OF_STOP)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank:05d}.log"

    def stacks(self, rank: int) -> Path:
        """Return the file with the stacks of all threads of a rank, after a hang."""
        return self.logs / f"stacks_rank_{rank:05d}.txt"

    def agent_log(self, node_rank: int) -> Path:
        """Return the log of torch's agent; it exists only if the agent has written a message."""
        return self.logs / f"agent_{node_rank:05d}.log"

    def as_typed(self) -> str:
        """Return the path as a person would type it: relative to the working directory, if it lies below."""
        return str(self.root.relative_to(Path.cwd())) if self.root.is_relative_to(Path.cwd()) else str(self.root)

    def resume_command(self) -> str:
        """Return the command that continues the run, or the sweep in this folder, as it can be pasted."""
        return f"ddp-train resume {shlex.quote(self.as_typed())}"
