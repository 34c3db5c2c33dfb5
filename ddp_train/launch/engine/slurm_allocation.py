"""A run inside an allocation that is there already: `ddp-train cluster=slurm` in salloc, or in a batch script of the user's own.

The same task on each machine as in a job of its own, started by srun as a child of this process. Nothing is requeued from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from ddp_train.errors import ConfigError
from ddp_train.launch.engine import slurm_client
from ddp_train.launch.engine.slurm_script import container, task_script
from ddp_train.launch.signals import stop_signals
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.starts import count_start
from ddp_train.run_folder.verdict import end_of, note_refusal
from ddp_train.system.files import write_atomic


def run(spec: Spec, job: str) -> int:
    """Run it on the machines of the allocation, to its end, and return the exit code of the run.

    Ctrl-C lets it save; a second one ends it at once.
    """
    has = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES", "")
    if has.isdigit() and int(has) < spec.min_nodes:
        raise ConfigError(
            key="cluster.nodes",
            happened=f"is {spec.min_nodes}, and the allocation (job {job}) has {has}",
            expected="as many machines as the allocation has, or fewer",
            fix=f"cluster.nodes={has}",
        )
    run_folder = spec.job.run_folder
    write_atomic(run_folder.launch / "task.sh", task_script(spec))
    run_folder.logs.mkdir(exist_ok=True)
    name = f"ddp_train-{spec.token[:8]}"  # by which the step is found
    before, inside = container(spec, folder=run_folder.root)
    nodes = min(spec.max_nodes, int(has)) if has.isdigit() else spec.max_nodes
    command = ["srun", f"--job-name={name}", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL"]
    command += [f"--kill-on-bad-exit={int(spec.min_nodes == spec.max_nodes)}", *before]
    if cpus := _cpus():
        command.append(f"--cpus-per-task={cpus}")
    command += [*inside, "bash", str(run_folder.launch / "task.sh"), "node", str(run_folder.spec)]
    count_start(run_folder, by_engine=True)
    ends = slurm_client.state(job).ends
    environment = {**os.environ, **({"SLURM_JOB_END_TIME": str(int(ends))} if ends is not None else {})}
    srun = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C reaches us alone

    def step() -> str | None:
        return slurm_client.step_named(job, name)

    def stop(number: int) -> None:
        if (found := step()) is not None:
            slurm_client.signal(found, str(number))
        else:
            srun.terminate()

    def kill() -> None:
        if (found := step()) is not None:
            slurm_client.signal(found, "KILL")
        with suppress(ProcessLookupError):
            srun.kill()

    with stop_signals(stop, kill):
        srun.wait()
    note_refusal(run_folder, srun.returncode, logs="the lines above", is_elastic=spec.min_nodes < spec.max_nodes)
    verdict, code = end_of(run_folder)
    print(verdict, file=sys.stderr)
    return code


def _cpus() -> int | None:
    """Return the CPUs that the allocation has on each of its machines at least."""
    counts = [part.partition("(")[0] for part in os.environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(",")]
    return min(map(int, counts)) if all(count.isdigit() for count in counts) else None
