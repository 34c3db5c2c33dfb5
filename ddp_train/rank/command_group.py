"""The ranks that get a command line from their agent, and no job: under a user's own torchrun, or of a sweep on several machines.

Global rank 0 alone lets Hydra compose, and announces in the store what the processes are for: one run, a sweep, or nothing (`--help`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import Store

from ddp_train.distributed.store import JoinedAttempt, wait_for
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, STOPPED, ConfigError, EnvironmentRefuses
from ddp_train.launch import restart_note
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import CommandLine, JobRunner
from ddp_train.rank.rank import RankEnding, run_job
from ddp_train.rank.restart import archive_earlier_failure, final_code_before
from ddp_train.rank.stop import end_users_agent
from ddp_train.run_folder import failure
from ddp_train.run_folder.starts import NO_PROGRESS_ERROR, NoProgress
from ddp_train.system import process_env
from ddp_train.system.process import command_line

if TYPE_CHECKING:
    from ddp_train.rank.sweep_member import Leader, Member

_LOOK_WITHIN_S = 60.0  # at a machine, which takes a second and a half where it does nothing else
_COMMAND_KEY = "command"  # where rank 0 says what the processes are for


class CommandGroup(JobRunner):
    """The ranks of an attempt that have a command line, `words`, as seen from one of them: on rank 0 they run the command's jobs."""

    def __init__(self, attempt: JoinedAttempt, words: Sequence[str]) -> None:
        super().__init__()
        self._attempt, self._words = attempt, words
        self._is_users_torchrun = process_env.NODE not in os.environ  # a person started the agent
        self._leader: Leader | None = None
        self._member: Member | None = None  # of a sweep; on rank 0 the leader
        self._is_announced = False
        self.job: Job | None = None  # the run that was announced

    def run(self, load_cli: Callable[[], CommandLine]) -> RankEnding:
        """Run the command line to its end. A stop of a sweep ends a user's agent, too; that of a run has done so already."""
        ending = self._lead(load_cli) if self._attempt.rank == 0 else self._follow()
        if ending.was_stopped and self._is_users_torchrun and (member := self._member) is not None:
            end_users_agent(lambda: member.is_stopping)
        return ending

    def _lead(self, load_cli: Callable[[], CommandLine]) -> RankEnding:
        """Let the command line run, with this group in the place of a launcher's ranks (rank 0)."""
        continues_from = self._attempt.continues_from
        if continues_from is not None:
            if (final_code := final_code_before(continues_from)) is not None:  # a user's torchrun starts all again
                self._announce({"exit_code": final_code})
                return RankEnding(final_code, was_stopped=False)
            archive_earlier_failure(continues_from, self._attempt.size)
        try:
            code = load_cli().resume(continues_from, self) if continues_from else load_cli().run(self._words, self)
            return RankEnding(code, was_stopped=code in STOPPED)
        finally:
            if self._leader is not None:
                self._leader.leave()
            elif not self._is_announced:
                self._announce({})

    def launch_job(self, job: Job) -> int:
        """Announce a run to the other ranks and run it with them (rank 0)."""
        if process_env.joining_hangs(command_line(os.getppid()), os.environ):
            print("warning  a machine that joins would wait forever: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun", flush=True)
        text = job.to_json()
        self._announce({"job": text})
        return self._run_job(Job.from_json(text)).exit_code  # what the others receive, to the letter

    def end_without_progress(self, job: Job, no_progress: NoProgress) -> int:
        """Show why a run is not to begin, and announce its exit code; recorded, so that a user's torchrun starts nothing again (rank 0)."""
        run_folder, code = job.run_folder, super().end_without_progress(job, no_progress)
        message = no_progress.screen(run_folder).strip()
        failure.Failure(rank=0, pid=os.getpid(), error=NO_PROGRESS_ERROR, message=message, exit_code=code).record(run_folder)
        restart_note.remember_run(run_folder.root)
        self._announce({"exit_code": code})
        return code

    def slots(self, folder: Path, count: int) -> list[Leader]:
        """Announce a sweep, and return the one place where its jobs run: these processes (rank 0)."""
        if count > 1:
            happened = f"is {count}, but torchrun started one group of processes"
            fix = f"ddp-train -m ... sweep.parallel_jobs={count}"
            raise ConfigError(key="sweep.parallel_jobs", happened=happened, expected="1 under torchrun", fix=fix)
        from ddp_train.rank.sweep_member import Leader

        restart_note.remember_run(folder)
        self._announce({"sweep": str(folder)})
        self._member = self._leader = Leader(self._attempt)
        return [self._leader]

    def _follow(self) -> RankEnding:
        """Take part in what rank 0 announces (other ranks)."""
        announced = json.loads(wait_for(self._attempt.store, _COMMAND_KEY))
        if "sweep" in announced:
            from ddp_train.rank.sweep_member import Member

            restart_note.remember_run(Path(announced["sweep"]))
            self._member = Member(self._attempt)
            return self._member.follow()
        if "job" in announced:
            return self._run_job(Job.from_json(announced["job"]))
        return RankEnding(announced.get("exit_code", DONE), was_stopped=False)

    def _announce(self, command: Mapping[str, Any]) -> None:
        self._is_announced = True
        self._attempt.store.set(_COMMAND_KEY, json.dumps(command))

    def _run_job(self, job: Job) -> RankEnding:
        self.job = job
        if self._is_users_torchrun and job.is_resumable and process_env.num_nodes() > 1:
            restart_note.remember_run(job.continues_from)
            if not _compare_machines(self._attempt.store, job, self._words):
                return RankEnding(ENVIRONMENT_REFUSES, was_stopped=False)
        return run_job(job, self._attempt, is_users_agent=self._is_users_torchrun)


def _compare_machines(store: Store, job: Job, words: Sequence[str]) -> bool:
    """Compare the machines of a user's own torchrun, as `launch/node` does for ours; return whether they can train together. Collective.

    What is wrong is printed on each. The words that were typed are compared, too: those of other machines than the first have no effect.
    """
    from ddp_train.config.cluster import Rendezvous
    from ddp_train.launch.node_facts.differences import differences  # these look at a machine, which no other run needs
    from ddp_train.launch.node_facts.facts import NodeFacts, collect, of_a_command_line

    rank, node, nodes = process_env.rank(), process_env.node_rank(), process_env.num_nodes()
    if process_env.local_rank() == 0:
        here = Rendezvous(min_nodes=nodes, max_nodes=nodes, node_rank=node)
        facts = collect(job.config, here, processes=process_env.local_world_size())
        store.set(f"machine/{node}", of_a_command_line(facts, words).to_json())
    if rank == 0:
        first, *others = (NodeFacts.from_json(wait_for(store, f"machine/{number}", within_s=_LOOK_WITHIN_S)) for number in range(nodes))
        problems = [f"{facts.host}: {problem}" for facts in (first, *others) for problem in facts.problems]
        problems += [sentence for other in others for sentence in differences(first, other)]
        store.set("compared", "\n    ".join(problems))
    text = wait_for(store, "compared", within_s=2 * _LOOK_WITHIN_S)
    if not text:
        return True
    happened = f"the machines cannot train together:\n    {text}"
    expected = "the same command, code, data and versions on each machine"
    fix = "fix these differences, then start torchrun again on all machines"
    error = EnvironmentRefuses(key="cluster", happened=happened, expected=expected, fix=fix)
    if process_env.local_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    if rank == 0:
        failure.from_exception(error, rank=rank, step=None).record(job.run_folder)
    return False
