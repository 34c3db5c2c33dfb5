"""SLURM: a batch script of its own kind, `sbatch`, `squeue`, `scancel`, and nothing between."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from ddp_train.errors import INTERRUPTED, ConfigError, EnvironmentRefuses
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.engine import Allocation, Engine, Rendered, Stage, State, Submission
from ddp_train.launch.engine.slurm_script import arrays, batch_script, common_folder, container, task_script, without_secrets
from ddp_train.launch.signals import LISTENED, handling_signals, stop_signals, stops_held_back
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import LogTail
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.verdict import note_refusal, verdict_after_end
from ddp_train.system.files import write_atomic

_POLL_S = 2.0


class Slurm(Engine):
    """The engine `slurm`."""

    has_queue = True

    def allocation(self) -> Allocation | None:
        """Return that of salloc, or of a batch script of the user's own."""
        job = slurm_client.allocation()
        return None if job is None else Allocation(id=job, starter="srun", run=partial(_run_in_allocation, job))

    def most_runs(self) -> int:
        """Return how many tasks SLURM takes in one array."""
        return slurm_client.most_tasks()

    def render(self, specs: Sequence[Spec]) -> Rendered:
        """Return the batch scripts, each run's task script, and the calls of sbatch: one for a run, or for an array of runs."""
        shares = arrays(specs)
        files: dict[Path, str] = {}
        for share in shares:
            script = common_folder(share) / "launch/slurm.sbatch"
            if number := sum(file.parent == script.parent for file in files):
                script = script.with_stem(f"slurm_{number}")
            files[script] = without_secrets(batch_script(share, among=len(shares)))
        return Rendered(
            files=files | {spec.job.run_folder.launch / "task.sh": task_script(spec) for spec in specs},
            commands=[["sbatch", "--parsable", str(script)] for script in files],
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
            with stops_held_back():  # else there is a job without a note of its id
                ids.append(id := slurm_client.submit(command))
                for number, run_folder in enumerate(islice(left, count)):
                    Submission(engine="slurm", id=id if count == 1 else f"{id}_{number}").write(run_folder)
        return ",".join(ids)

    def state(self, id: str) -> State:
        return slurm_client.state(id)

    def stop(self, id: str, *, at_once: bool = False) -> None:
        """Let it save and end: by the signal of an early warning, after which SLURM kills nothing."""
        if at_once or slurm_client.state(id).stage is Stage.QUEUED:
            slurm_client.cancel(id)
        else:
            slurm_client.signal(id, "USR1")

    def follow(self, run_folder: RunFolder, id: str) -> int:
        """Show the states and the logs of a job until it has ended, and return the run's exit code. After Ctrl-C the job goes on: 130."""
        tail, last_line, stage = LogTail(run_folder), "", Stage.QUEUED
        try:
            while stage is not Stage.ENDED:
                try:
                    state = self.state(id)
                    stage, line = state.stage, f"job {id}: {state}"
                except EnvironmentRefuses as error:  # a controller that is being restarted
                    line = str(error)
                if line != last_line:
                    print(last_line := line, file=sys.stderr, flush=True)
                for log_line in tail.lines():
                    print(log_line, flush=True)
                time.sleep(0.0 if stage is Stage.ENDED else _POLL_S)
        except KeyboardInterrupt:
            print(f"\njob {id} continues; `ddp-train cancel {shlex.quote(run_folder.as_typed())}` makes it save and stop", file=sys.stderr)
            return INTERRUPTED
        verdict, code = verdict_after_end(run_folder)
        print(verdict, file=sys.stderr)
        return code


def _run_in_allocation(job: str, spec: Spec) -> int:
    """Run it to its end in the allocation of a job, and return the run's exit code.

    A child of this process, srun, starts the same task on each machine as in a job of its own. Nothing is requeued from here.
    """
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES", "")
    if num_nodes.isdigit() and int(num_nodes) < spec.min_nodes:
        happened = f"is {spec.min_nodes}, but the allocation (job {job}) has {num_nodes}"
        raise ConfigError(key="cluster.nodes", happened=happened, fix=f"cluster.nodes={num_nodes}")
    run_folder = spec.job.run_folder
    write_atomic(run_folder.launch / "task.sh", task_script(spec))
    run_folder.logs.mkdir(exist_ok=True)
    name = f"ddp_train-{spec.token[:8]}"  # by which the step is found
    before, inside = container(spec, folder=run_folder.root)
    nodes = min(spec.max_nodes, int(num_nodes)) if num_nodes.isdigit() else spec.max_nodes
    command = ["srun", f"--job-name={name}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL"]
    command += [f"--kill-on-bad-exit={int(not spec.is_elastic)}", *before]
    if cpus := _cpus():
        command.append(f"--cpus-per-task={cpus}")
    command += [*inside, "bash", str(run_folder.launch / "task.sh"), "node", str(run_folder.spec)]
    AttemptCount(run_folder).begin_under_engine()
    environment = dict(os.environ)
    if (ends := slurm_client.state(job).ends) is not None:
        environment["SLURM_JOB_END_TIME"] = str(int(ends))

    def stop(number: int | str) -> None:
        if (step := slurm_client.step_named(job, name)) is not None:
            slurm_client.signal(step, str(number))
        else:
            srun.terminate()

    def kill() -> None:
        stop("KILL")
        srun.kill()

    came: list[int] = []
    with handling_signals(LISTENED, lambda number, frame: came.append(number)):  # until srun is there to have them
        srun = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C reaches us alone
        with stop_signals(stop, kill):
            for number in came:
                signal.raise_signal(number)
            srun.wait()
    note_refusal(run_folder, srun.returncode, logs="the lines above", is_elastic=spec.is_elastic)
    verdict, code = verdict_after_end(run_folder)
    print(verdict, file=sys.stderr)
    return code


def _cpus() -> int | None:
    """Return the CPUs that the allocation has on each of its machines at least."""
    counts = [part.partition("(")[0] for part in os.environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(",")]
    return min(map(int, counts)) if all(count.isdigit() for count in counts) else None


ENGINE: Engine = Slurm()
