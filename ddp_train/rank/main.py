"""The processes that a torchrun agent started, one per rank: what they are for, and who of them does it.

For a single run they are the ranks. For a sweep they are `Member`s, and the jobs run in processes forked from them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import Store

from ddp_train.checkpoint.catalog import is_checkpoint
from ddp_train.config.targets.locate import locate
from ddp_train.distributed.attempt import LEAVE_WITHIN_S, Attempt, agree_on_attempt, leave
from ddp_train.distributed.store import join_store, wait_for
from ddp_train.errors import DONE, ENVIRONMENT_REFUSES, FINAL, NO_PROGRESS, ConfigError, EnvironmentRefuses, UserError
from ddp_train.launch.job import Job
from ddp_train.launch.launcher import Launcher
from ddp_train.rank.rank import LOST, run_rank
from ddp_train.rank.stop import end_agent
from ddp_train.run_folder import failure, restart_note
from ddp_train.run_folder.paths import RunFolder, is_sweep
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP
from ddp_train.run_folder.starts import NO_PROGRESS_ERROR, close_last_attempt
from ddp_train.system import handover, torchrun_env
from ddp_train.system.process import command_line

if TYPE_CHECKING:
    from ddp_train.rank.sweep_member import Leader, Member

_LEAVES_PROGRAM_WITHIN_S = 3.0  # another program than training: some ranks may be stuck, and it has said what it had to say
_LOOK_WITHIN_S = 60.0  # at a machine, which takes a second and a half where it does nothing else
_SHOWN = 160  # characters of an error in the one line of a restart
_COMMAND_KEY = "command"  # where rank 0 says what the processes are for


def main(load_cli: Callable[[], Any], words: Sequence[str]) -> int:
    """Serve the one job that `ddp-train` composed, the jobs of its sweep, or else what the command line asks for. Every rank runs this.

    Global rank 0 alone lets Hydra compose; the other ranks compose nothing.

    Args:
        load_cli: imports `cli.main`, which runs the command line where rank 0 finds no job in its environment.
        words: the command line.
    """
    # DDP says this of every convolution with one input channel, whose strides are ambiguous; nothing is slower for it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    logging.raiseExceptions = False  # a log that cannot be written (a full disk) must not drown the failure's screen
    if handover.FRESH_RANK in os.environ:
        from ddp_train.rank.sweep_member import run_fresh_rank

        run_fresh_rank()
    try:
        group = WorkerGroup.meet(os.environ, words)
    except UserError as error:
        print(error, file=sys.stderr)
        return ENVIRONMENT_REFUSES
    code = group.serve(load_cli)
    if code in EXIT_CODE_OF_STOP.values():  # the agent may start the ranks again, in another number, and some may be gone
        group.end_agent()
        return DONE  # it has not failed: torchrun must neither restart it nor put its page about failures over our last line
    group.leave()
    if code not in FINAL:  # else a user's torchrun starts all again, and is told the same at once
        restart_note.forget_run()
    return code


@dataclass(kw_only=True)
class WorkerGroup:
    """The worker group of an attempt, as seen from one of its processes.

    An agent of ours says what they are for: a job, or the jobs of a launcher. Otherwise rank 0 says it in the store: one run, a sweep, or
    nothing (`--help`).
    """

    job: Job | None
    sweep_group: Path | None  # the folder with the socket through which the launcher of a sweep sends its jobs
    is_users_torchrun: bool  # a person started the agent
    words: Sequence[str]  # the command line
    attempt: Attempt
    final_code: int | None  # of the attempt before, after which there is nothing to try again

    def __post_init__(self) -> None:
        self._leader: Leader | None = None
        self._member: Member | None = None  # of a sweep under a user's torchrun; on rank 0 the leader
        self._is_announced = False
        self._leaves_within_s = LEAVE_WITHIN_S

    @classmethod
    def meet(cls, environment: Mapping[str, str], words: Sequence[str]) -> WorkerGroup:
        """Meet the other ranks, and make way for what this attempt writes. Collective. Raises UserError: a rank did not come."""
        job = Job.from_json(environment[handover.JOB]) if handover.JOB in environment else None
        sweep_group = Path(environment[handover.GROUP]) if handover.GROUP in environment else None
        rank, size = torchrun_env.rank(), torchrun_env.world_size()
        note = restart_note.recall_run()
        # Whether a failure here has started the ranks again, and not a machine that came or went.
        follows_failure = note is not None and torchrun_env.restart_count() > note.restarts
        final_code = None
        if note is not None and rank == 0 and job is not None:  # before any rank of this attempt can fail
            _make_way(note.folder, size, follows_failure=follows_failure)
        attempt = agree_on_attempt(join_store(), rank, size, remembered=None if note is None else note.folder)
        if attempt.remembered is not None and rank == 0 and job is None:
            final_code = _make_way(attempt.remembered, size, follows_failure=follows_failure)
        is_users = not {handover.JOB, handover.GROUP, handover.NODE} & environment.keys()
        return cls(job=job, sweep_group=sweep_group, is_users_torchrun=is_users, words=words, attempt=attempt, final_code=final_code)

    def serve(self, load_cli: Callable[[], Any]) -> int:
        """Do what the processes are for, to its end, and return the exit code."""
        remembered = self.attempt.remembered
        if (job := self.job) is not None:
            if remembered is not None:  # this attempt begins where the one before it had got to
                job = replace(job, checkpoint=str(remembered) if remembered != job.run_folder.root else None)
            return self._as_rank(job)
        if self.sweep_group is not None:
            from ddp_train.rank.sweep_member import Leader, Member, serve  # a single run does without

            if self.attempt.rank != 0:
                return Member(self.attempt).follow()
            return serve(Leader(self.attempt), self.sweep_group)
        if self.attempt.rank != 0:
            return self._follow()
        if self.final_code is not None:
            self._announce({"exit_code": self.final_code})
            return self.final_code
        launcher = Launcher(run=self._run, slots=self._slots)
        try:
            return int(load_cli().resume(remembered, launcher) if remembered else load_cli().run(self.words, launcher))
        finally:
            if self._leader is not None:
                self._leader.leave()
            elif not self._is_announced:
                self._announce({})

    def end_agent(self) -> None:
        """End a user's torchrun where its sweep was stopped."""
        if (member := self._member) is not None and self.is_users_torchrun:
            end_agent(lambda: member.is_stopping)

    def leave(self) -> None:
        leave(self.attempt.store, self.attempt.rank, self.attempt.size, within_s=self._leaves_within_s)

    def _run(self, job: Job) -> int:
        """Announce a run to the other ranks and run it with them (rank 0)."""
        counts_anew = job.checkpoint is not None and not self.attempt.remembered
        if no_progress := close_last_attempt(job.run_folder, counts_anew=counts_anew):
            screen = no_progress.screen(job.run_folder)
            print(screen, file=sys.stderr, flush=True)
            report = failure.Failure(rank=0, pid=os.getpid(), error=NO_PROGRESS_ERROR, message=screen.strip(), exit_code=NO_PROGRESS)
            report.record(job.run_folder)
            restart_note.remember_run(job.run_folder.root)
            self._announce({"exit_code": NO_PROGRESS})
            return NO_PROGRESS
        if torchrun_env.joining_hangs(command_line(os.getppid()), os.environ):
            print("warning  a machine that joins would wait for ever: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each torchrun", flush=True)
        text = job.to_json()
        self._announce({"job": text})
        return self._as_rank(Job.from_json(text))  # what the others receive, to the letter

    def _slots(self, folder: Path, count: int) -> list[Leader]:
        """Announce a sweep, and return the one place where its jobs run: these processes (rank 0)."""
        if count > 1:
            happened = f"is {count}, but torchrun started one group of processes"
            fix = f"ddp-train -m ... sweep.parallel_jobs={count}"
            raise ConfigError(key="sweep.parallel_jobs", happened=happened, expected="1 under torchrun", fix=fix)
        from ddp_train.rank.sweep_member import Leader

        restart_note.remember_run(folder)
        self._announce({"sweep": str(folder)})
        self._member = self._leader = Leader(self.attempt)
        return [self._leader]

    def _follow(self) -> int:
        """Take part in what rank 0 announces (other ranks)."""
        announced = json.loads(wait_for(self.attempt.store, _COMMAND_KEY))
        if "sweep" in announced:
            from ddp_train.rank.sweep_member import Member

            restart_note.remember_run(Path(announced["sweep"]))
            self._member = Member(self.attempt)
            return self._member.follow()
        return self._as_rank(Job.from_json(announced["job"])) if "job" in announced else announced.get("exit_code", DONE)

    def _announce(self, command: Mapping[str, Any]) -> None:
        self._is_announced = True
        self.attempt.store.set(_COMMAND_KEY, json.dumps(command))

    def _as_rank(self, job: Job) -> int:
        if job.program:
            self._leaves_within_s = _LEAVES_PROGRAM_WITHIN_S
            return int(locate(job.program)(self.attempt, job))
        restart_note.remember_run(Path(job.checkpoint) if job.checkpoint else job.run_folder.root)
        if self.is_users_torchrun and torchrun_env.num_nodes() > 1 and not _compare_machines(self.attempt.store, job, self.words):
            return ENVIRONMENT_REFUSES
        return run_rank(job, self.attempt.store, self.attempt.rank, self.attempt.size, is_users_agent=self.is_users_torchrun)


def _make_way(remembered: Path, size: int, *, follows_failure: bool) -> int | None:
    """Say why the run starts again, and move what the attempt before has left out of the way (rank 0).

    Returns the exit code of a failure after which there is nothing to try again, and makes no way: a user's torchrun starts all again.
    """
    run_folder = RunFolder(remembered.parent.parent if is_checkpoint(remembered) else remembered)
    report = failure.load_report(run_folder.failure)
    if report is not None and report.exit_code in FINAL and follows_failure:
        return report.exit_code
    print(restart_line(run_folder, size=size, has_failed=follows_failure), flush=True)
    run_folder.archive_failure()
    return None


def _compare_machines(store: Store, job: Job, words: Sequence[str]) -> bool:
    """Compare the machines of a user's own torchrun, as `launch/node` does for ours; return whether they can train together. Collective.

    What is wrong is printed on each. The words that were typed are compared, too: those of other machines than the first have no effect.
    """
    from ddp_train.config.cluster import Rendezvous
    from ddp_train.launch.node.differences import differences  # these look at a machine, which no other run needs
    from ddp_train.launch.node.facts import NodeFacts, collect, of_a_command_line

    rank, node, nodes = torchrun_env.rank(), torchrun_env.node_rank(), torchrun_env.num_nodes()
    if torchrun_env.local_rank() == 0:
        here = Rendezvous(min_nodes=nodes, max_nodes=nodes, node_rank=node)
        facts = collect(job.config, here, processes=torchrun_env.local_world_size())
        store.set(f"machine/{node}", of_a_command_line(facts, words).to_json())
    if rank == 0:
        first, *others = (NodeFacts.from_json(wait_for(store, f"machine/{number}", within_s=_LOOK_WITHIN_S)) for number in range(nodes))
        problems = [f"{facts.host}: {problem}" for facts in (first, *others) for problem in facts.problems]
        store.set("compared", "\n    ".join(problems + [sentence for other in others for sentence in differences(first, other)]))
    text = wait_for(store, "compared", within_s=2 * _LOOK_WITHIN_S)
    error = EnvironmentRefuses(
        key="cluster",
        happened=f"the machines cannot train together:\n    {text}",
        expected="the same command, code, data and versions on each machine",
        fix="mend what is named, and start torchrun again on all machines",
    )
    if text and torchrun_env.local_rank() == 0:
        print(error, file=sys.stderr, flush=True)
    if text and rank == 0:
        failure.from_exception(error, rank=rank, step=None).record(job.run_folder)
    return not text


def restart_line(run_folder: RunFolder, *, size: int, has_failed: bool) -> str:
    """Say in one line why the ranks have started again, and where they continue. To be asked before the earlier failure makes way.

    The failure's screen is for the last failure. The ones before it stay as failure.1.json, failure.2.json, ...

    Args:
        has_failed: whether a failure on this machine is the reason.
    """
    place = "continues the sweep" if is_sweep(run_folder.root) else run_folder.continues()
    report = failure.load_report(run_folder.failure)
    if report is None and not has_failed:
        return f"the machines have changed; {size} ranks continue {place.removeprefix('continues ')}"
    reason = "a rank ended without a report"
    if report is not None and report.error == failure.MACHINE_LOST:
        reason = report.message
    elif report is not None and LOST not in report.traceback:
        reason = f"rank {report.rank} failed ({report.error if report.error.startswith('SIG') else report.line(_SHOWN)})"
    return f"{reason}; restart {torchrun_env.restart_count()} of {torchrun_env.max_restarts()} {place}"
