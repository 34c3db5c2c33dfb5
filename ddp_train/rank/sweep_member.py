"""A sweep's member: from it the process is forked that is a rank of one job, and for the next job another one.

torchrun starts one member for each rank. A member imports torch, touches no device and trains nothing: so it survives whatever a job does,
a rank that is forked from it starts in a moment, and nothing of a job is left in the next. The member of rank 0 leads: it announces each
job in the rendezvous store, and the others follow. When one rank fails, every member ends its own.
"""

import gc
import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NoReturn

from torch.distributed import Store

from ddp_train.distributed.store import JoinedAttempt, join_store_again, leave, wait_for
from ddp_train.errors import DONE, FAILED
from ddp_train.launch.fork_requests import RankRequest
from ddp_train.launch.job import Job
from ddp_train.rank.forked import setup_forked_rank
from ddp_train.rank.rank import RankEnding, run_as_rank
from ddp_train.run_folder import failure
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Status
from ddp_train.system import process_env
from ddp_train.system.deadline import wait_until
from ddp_train.system.folder_lock import unlock_all
from ddp_train.system.process import STOP_SIGNALS, Child, exit_at_once, fork, oom_kills, ran_out

_FRESH = "this rank needed a new interpreter, which took some seconds, because a module of yours uses CUDA when it is imported"
_IMPORTED_IN = os.getpid()  # of a fork the member
_POLL_S = 0.1
_LOOKS_EVERY_S = 0.005
_DIES_WITHIN_S = 5.0
_REPORT_WITHIN_S = 1.0


@dataclass(kw_only=True)
class _RunningJob:
    text: str  # `Job.to_json`
    key: str  # where it stands in the store; its result stands below it
    place: Store  # of its ranks
    oom_kills: int | None  # before it began
    child: Child  # this member's rank
    started: float = field(default_factory=time.monotonic)
    status: Status | None = None  # of the rank at its end


class Member:
    """One rank's member. The store of its attempt survives the ranks, which have a place of their own there for each job."""

    def __init__(self, attempt: JoinedAttempt) -> None:
        self._store, self._prefix, self._rank, self._size = attempt.store, attempt.prefix, attempt.rank, attempt.size
        self._running: _RunningJob | None = None  # the newest job, also when it has ended
        self._number = 0  # of it, from 1
        self.is_stopping = False
        importlib.import_module("torch.utils.tensorboard")  # every rank needs it; once is enough
        gc.collect()
        gc.freeze()  # what is here now stays in every rank: collecting there need not look at it, nor copy its pages

    def follow(self) -> RankEnding:
        """Run every job that the leader announces, until it announces the end or the agent does (members of the ranks other than 0)."""
        while not self.is_stopping and (job := wait_for(self._store, f"job/{self._number + 1}")):
            self.begin(job)
            while self.poll_rank(_POLL_S) is None:
                pass
        self.end_rank()
        status = self._running.status if self._running is not None else None
        return RankEnding(DONE, was_stopped=self.is_stopping or status in EXIT_CODE_OF_STOP)

    def begin(self, job: str) -> None:
        """Fork the rank for the next job, `Job.to_json`."""
        self.end_rank()
        self._number += 1
        place = f"{self._prefix}/ranks_{self._number}"
        running = self._running = _RunningJob(
            text=job,
            key=f"job/{self._number}",
            place=join_store_again(place),
            oom_kills=oom_kills(),
            child=fork(partial(_become_rank, place)),
        )
        running.place.set("job", job)
        for number in STOP_SIGNALS:  # the agent tells the rank too, which saves and reports: wait for it
            if signal.getsignal(number) == signal.SIG_DFL:  # else Hydra's process runs the sweep here, and `stop` is called
                signal.signal(number, self.stop)
        self._store.set(f"{running.key}/pid/{self._rank}", str(running.child.pid))

    def poll_rank(self, timeout_s: float) -> Status | None:
        """Return how this rank's part of the job has ended, or None when it runs still."""
        running = self._running
        assert running is not None
        if running.status is not None:
            return running.status
        child, status = running.child, None
        if wait_until(lambda: child.exit_code() is not None, within_s=timeout_s, every_s=_LOOKS_EVERY_S):
            key = f"ended/{self._rank}"
            status = Status(running.place.get(key).decode()) if running.place.check([key]) else self._report_death(running)
        elif self._store.check([f"{running.key}/failed"]):  # on another rank: this one waits for it in vain
            status = Status.FAILED
        if status is None:
            return None
        if status is Status.FAILED:
            self._store.set(f"{running.key}/failed", str(self._rank))
            self.end_rank(at_once=True)
        self._store.add(f"{running.key}/done", 1)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == self.stop:
                signal.signal(number, signal.SIG_DFL)
        running.status = status
        return status

    def end_rank(self, *, at_once: bool = False) -> None:
        if self._running is not None:
            child = self._running.child
            wait_until(lambda: child.exit_code() is not None, within_s=0.0 if at_once else _DIES_WITHIN_S, every_s=_LOOKS_EVERY_S)
            child.signal(signal.SIGKILL)
            child.wait()

    def _report_death(self, running: _RunningJob) -> Status:
        """Record the death of a rank that left no report, and what the other ranks were doing."""
        pid, exit_code = running.child.pid, running.child.wait()
        run_folder = Job.from_json(running.text).run_folder

        def stopped() -> Status | None:
            result = run_folder.read_result()
            return result.status if result is not None and result.status in EXIT_CODE_OF_STOP else None

        if exit_code == DONE:  # a signal came before its first step: its ranks leave, and rank 0 writes it down
            wait_until(lambda: stopped() is not None, within_s=_REPORT_WITHIN_S, every_s=0.02)
            if (status := stopped()) is not None:
                return status
        if not self.is_stopping and not run_folder.is_completed() and not run_folder.failure.exists():
            time.sleep(_REPORT_WITHIN_S)  # the others find their connection broken, and log what they were doing
            pid_keys = {rank: f"{running.key}/pid/{rank}" for rank in range(self._size) if rank != self._rank}
            pids = {rank: int(self._store.get(key)) for rank, key in pid_keys.items() if self._store.check([key])}
            is_oom = ran_out(running.oom_kills)
            report = failure.from_exit(rank=self._rank, pid=pid, exit_code=exit_code, run_folder=run_folder, was_out_of_memory=is_oom)
            report.with_others(failure.last_activities(run_folder, pids)).record(run_folder, seconds=time.monotonic() - running.started)
        return Status.FAILED

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Pass on a stop signal: the rank saves and ends, and this member with it. SIGKILL ends the rank at once; the others notice."""
        self.is_stopping = True
        if self._running is not None:
            self._running.child.signal(number)


class Leader(Member):
    """The member of rank 0: runs jobs with all the others. A `launch.job_runner.Slot`."""

    def start(self, job: Job) -> None:
        text = job.to_json()
        self._store.set(f"job/{self._number + 1}", text)
        self.begin(text)

    def poll(self, timeout_s: float) -> int | None:
        status = self.poll_rank(timeout_s)
        if status is None:
            return None
        assert self._running is not None
        key = self._running.key
        if self.is_stopping and status is Status.FAILED:
            return FAILED  # another member may be gone, and never be done
        if int(self._store.add(f"{key}/done", 0)) < self._size:
            time.sleep(min(timeout_s, 0.002))
            return None
        return FAILED if self._store.check([f"{key}/failed"]) else EXIT_CODE_OF_STOP.get(status, DONE)

    def end(self) -> None:
        """Do nothing: the next job ends the ranks of this one."""

    def leave(self) -> None:
        """Tell the other members that no job follows, and end."""
        self._store.set(f"job/{self._number + 1}", "")
        self.end_rank()


def _become_rank(place: str) -> NoReturn:
    """Be the rank of a job, in a forked process; or a fresh interpreter, where a module of the user's has used CUDA in the member."""
    unlock_all()  # the folders are the member's, whose life is longer
    setup_forked_rank(RankRequest(words=sys.argv[1:], environment={process_env.PLACE: place}, stdout="", stderr=""))
    run_for_member()
    exit_at_once(DONE)


def run_for_member() -> None:
    """Be the rank of the job that a member has put into the store, at the place in this process's environment; tell it how that ended."""
    store, rank, size = join_store_again(os.environ[process_env.PLACE]), process_env.rank(), process_env.world_size()
    is_forked = os.getpid() != _IMPORTED_IN
    job = Job.from_json(wait_for(store, "job"))
    status = run_as_rank(job, store, rank, size, remark=None if is_forked else _FRESH)
    store.set(f"ended/{rank}", status)
    if status not in EXIT_CODE_OF_STOP:
        leave(store, rank, size)
