"""SLURM: a batch script of its own kind, `sbatch`, `squeue`, `scancel`, and nothing between."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Rendered, Stage, State, Submission
from ddp_train.launch.engine.slurm_script import arrays, batch_script, common_folder, signal_s, task_script, without_secrets
from ddp_train.launch.signals import held_back
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.log_tail import LogTail
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.verdict import end_of, mark_cancelled

_POLL_S = 2.0
_SIGNAL_EVERY_S = 5.0  # one that comes while a job is between two of its steps reaches nobody


class Slurm:
    """The engine `slurm`."""

    def render(self, specs: Sequence[Spec]) -> Rendered:
        """Return the batch scripts, each run's task script, and the calls of sbatch: one for a run, or for an array of runs."""
        shares = arrays(specs)
        files: dict[Path, str] = {}
        for share in shares:
            script = common_folder(share) / "launch/slurm.sbatch"
            number = sum(each.parent == script.parent for each in files)
            files[script.with_stem(f"slurm_{number}") if number else script] = without_secrets(batch_script(share, among=len(shares)))
        commands = [["sbatch", "--parsable", str(script)] for script in files]
        files |= {spec.job.run_folder.launch / "task.sh": task_script(spec) for spec in specs}
        return Rendered(
            files=files,
            commands=commands,
            run_folders=[spec.job.run_folder.root for share in shares for spec in share],
            shares=[len(share) for share in shares],
        )

    def submit(self, rendered: Rendered) -> str:
        """Submit it; a task of an array is noted as ARRAY_NUMBER in its run's folder. Several arrays: their ids with commas between."""
        rendered.write()
        run_folders = [RunFolder(root) for root in rendered.run_folders]
        for run_folder in run_folders:
            run_folder.logs.mkdir(exist_ok=True)  # SLURM makes no folders
        ids, left = [], iter(run_folders)
        for command, count in zip(rendered.commands, rendered.shares, strict=True):
            with held_back():  # else there is a job that nobody knows
                ids.append(id := slurm_client.submit(command))
                for number, run_folder in enumerate(islice(left, count)):
                    Submission(engine="slurm", id=id if count == 1 else f"{id}_{number}").write(run_folder)
        return ",".join(ids)

    def state(self, id: str) -> State:
        """Return where a job is, or a task of an array."""
        return slurm_client.state(id)

    def stop(self, id: str, *, at_once: bool = False) -> None:
        """Let it save and end: by the signal of an early warning, after which SLURM kills nothing."""
        if at_once or slurm_client.state(id).stage is Stage.QUEUED:
            slurm_client.cancel(id)
        else:
            slurm_client.signal(id, "USR1")

    def follow(self, run_folder: RunFolder, id: str) -> int:
        """Show the states and the logs of a job until it has ended, and return the run's exit code.

        The first Ctrl-C says what the second does: let it save and end. The third ends it at once.
        """
        said, times, tail = "", 0, LogTail(run_folder)
        told_at = -_SIGNAL_EVERY_S
        while True:
            try:
                if times > 1 and not run_folder.cancelled.exists():
                    mark_cancelled(run_folder)
                if run_folder.cancelled.exists() and time.monotonic() >= told_at + _SIGNAL_EVERY_S:
                    told_at = time.monotonic()
                    with suppress(EnvironmentRefuses):  # a controller that is being restarted: it is told again
                        self.stop(id, at_once=times > 2)
                found, line = self._look(id)
                if line != said:
                    print(said := line, file=sys.stderr, flush=True)
                for each in tail.lines():
                    print(each, flush=True)
                if found is not None and found.stage is Stage.ENDED:
                    break
                time.sleep(_POLL_S)
            except KeyboardInterrupt:
                times, told_at = times + 1, -_SIGNAL_EVERY_S
                if times == 1:
                    print(f"\njob {id} goes on without this command; Ctrl-C again lets it save and end", file=sys.stderr)
        verdict, code = end_of(run_folder)
        print(verdict, file=sys.stderr)
        return code

    def _look(self, id: str) -> tuple[State | None, str]:
        try:
            found = self.state(id)
        except EnvironmentRefuses as error:  # a controller that is being restarted
            return None, str(error)
        return found, f"job {id}: {found}"


def cautions(spec: Spec) -> list[str]:
    """Say where SLURM kills sooner than the run may take to save."""
    cluster = spec.job.config.cluster
    found = slurm_client.waits(cluster.slurm.partition)
    if found is None:
        return []
    lines = []
    has = f"note: cluster.grace_s is {cluster.grace_s}, and"
    if found.kill_wait_s < cluster.grace_s:
        lines.append(
            f"{has} a bare `scancel` kills after {found.kill_wait_s} s (KillWait): it may cut a save short.\n"
            f"  `ddp-train cancel` waits; of the time limit the run is warned {signal_s(spec)} s before"
        )
    if found.preemption_s is not None and found.preemption_s < cluster.grace_s:
        lines.append(
            f"{has} preemption in partition {found.partition} kills after {found.preemption_s} s (GraceTime): it may cut a save short.\n"
            "  Save often (checkpoint.every_minutes)"
        )
    return lines


ENGINE = Slurm()
