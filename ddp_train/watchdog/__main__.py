"""The process that watches the ranks of one machine: it names a rank that hangs, with its stack, and ends it.

    python -m ddp_train.watchdog PID_OF_LOCAL_RANK_0 WATCH_REQUEST

Its standard input is closed when the job is over. It imports no torch and needs nothing from the ranks: it reads their heartbeats and
stacks in shared memory (`system/process.py`).
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system import stack_dump
from ddp_train.system.deadline import wait_until
from ddp_train.system.process import STOP_SIGNALS, descendants, die_with_parent, is_alive, outlive_parent, parent_of, state_of
from ddp_train.system.process_env import is_last_attempt
from ddp_train.watchdog import diagnosis
from ddp_train.watchdog.client import OTHER_MACHINES, Heartbeat, HeartbeatReader, RecordRequest, WatchRequest
from ddp_train.watchdog.diagnosis import Culprit, LoaderWorker, RankView

_POLL_S = 0.2
_CALM_POLL_S = 1.0  # at most, while no rank is near the limit: every check takes a processor from the ranks
_GAP_S = 2.0  # a poll that is later than this: this process was suspended, and probably the ranks too
_ENDS_WITHIN_S = 3.0  # after a rank was killed; its agent ends the others, unless they are stuck as well


def main() -> None:
    """Watch until the job is over, local rank 0 has ended, or a hang was reported."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the ranks handle them; this process ends with the ranks
    die_with_parent(int(sys.argv[1]))
    ranks = _WatchedRanks(WatchRequest(**json.loads(sys.argv[2])))
    checked_at = time.monotonic()
    while not ranks.is_over:
        wait_s = ranks.next_check_s()
        if select.select([0], [], [], wait_s)[0]:  # it is closed
            return
        now = time.monotonic()
        if now - checked_at > wait_s + _GAP_S:
            ranks.watched_since = now
        ranks.check(now)
        checked_at = time.monotonic()


class _WatchedRanks:
    """The job's ranks on this machine."""

    def __init__(self, request: WatchRequest) -> None:
        self._request = request
        self._run_folder = RunFolder(Path(request.run_folder))
        self._began = time.monotonic()
        self.watched_since = self._began  # a standstill counts from here: set anew after this machine or the job was suspended
        self._heartbeats = {rank: HeartbeatReader(pid) for rank, pid in request.pids}
        self._innocent_since: dict[int, float] = {}  # rank -> the time of its last beat when a check found it waiting for others
        self._is_failing = False  # another process has reported a failure, and the agent ends the ranks
        self._until_overdue_s = 0.0  # until the first rank will be, seen from the last check
        self.is_over = False

    def next_check_s(self) -> float:
        """Return the seconds until the next check: the nearer a rank is to its limit, the sooner."""
        return min(max(self._until_overdue_s / 2, _POLL_S), _CALM_POLL_S)

    def check(self, now: float) -> None:
        """End the job if ranks have not moved for too long and are to blame for it."""
        pids = {rank: pid for rank, pid in self._request.pids if is_alive(pid)}
        if not self._is_failing and (len(pids) < len(self._request.pids) or self._run_folder.failure.exists()):
            self._is_failing = True
            self.watched_since = now
            reported = failure.load_report(self._run_folder.failure)
            if reported is not None and reported.kind == failure.FailureKind.HANG:  # on another machine, whose report needs our collectives
                RecordRequest(pids, self._run_folder.logs)
        if not pids or self._is_suspended(list(pids.values())):
            self.watched_since = now
            return
        heartbeats = {rank: self._heartbeats[rank].last(since=self._began) for rank in pids}
        still_s = {rank: now - max(heartbeat.time, self.watched_since) for rank, heartbeat in heartbeats.items()}
        self._until_overdue_s = min(self._limit(heartbeats[rank]) - still_s[rank] for rank in pids)
        overdue = [rank for rank in pids if still_s[rank] > self._limit(heartbeats[rank])]
        waits_elsewhere = len(overdue) == len(pids) and self._request.world_size > len(self._request.pids)
        blames_elsewhere = waits_elsewhere and all(still_s[rank] > OTHER_MACHINES * self._limit(heartbeats[rank]) for rank in overdue)
        if not blames_elsewhere and all(self._innocent_since.get(rank) == heartbeats[rank].time for rank in overdue):
            return
        running = [pid for pid in pids.values() if state_of(pid) not in diagnosis.STOPPED]
        texts = stack_dump.ask(running)
        native = stack_dump.in_native_code(running) if self._request.uses_device else set()
        ranks = [self._view(rank, pid, heartbeats[rank], still_s[rank], texts.get(pid, ""), pid in native) for rank, pid in pids.items()]
        culprits = diagnosis.find_culprits(ranks, overdue)
        if not culprits and len(overdue) == len(pids) and not waits_elsewhere:
            culprits = [diagnosis.find_any_culprit(ranks)]
        if not culprits and blames_elsewhere:
            culprits = [diagnosis.suspect_other_machine(ranks)]
        if culprits:
            self._end(culprits, ranks, texts)
        else:
            self._innocent_since |= {rank: heartbeats[rank].time for rank in overdue}

    def _limit(self, heartbeat: Heartbeat) -> float:
        limit = self._request.step_timeout_s if heartbeat.has_taken_a_step else self._request.start_timeout_s
        return float("inf") if limit is None else limit

    def _is_suspended(self, pids: Sequence[int]) -> bool:
        """Tell whether the whole job was suspended on this machine, which is no hang. A single rank counts with its parent."""
        states = [state_of(pid) for pid in pids]
        if len(pids) == 1:
            states.append(state_of(parent_of(pids[0])))
        return all(state in diagnosis.STOPPED for state in states)

    def _view(self, rank: int, pid: int, heartbeat: Heartbeat, still_s: float, text: str, is_in_native_code: bool) -> RankView:
        workers = []
        for child in descendants(pid):
            state = state_of(child)
            note = stack_dump.note_of(child)
            if child != os.getpid() and (note or state in (*diagnosis.STOPPED, diagnosis.IN_KERNEL)):
                answer = "" if state in diagnosis.STOPPED else stack_dump.ask([child], within_s=0.5).get(child, "")
                workers.append(LoaderWorker(pid=child, state=state, reads=note, frames=stack_dump.main_thread(answer)))
        return RankView(
            rank=rank,
            pid=pid,
            state=state_of(pid),
            heartbeat=heartbeat,
            still_s=still_s,
            frames=stack_dump.main_thread(text),
            workers=workers,
            uses_device=self._request.uses_device,
            is_in_native_code=is_in_native_code,
        )

    def _end(self, culprits: Sequence[Culprit], ranks: Sequence[RankView], texts: dict[int, str]) -> None:
        """Report the hang, and kill the culprits; the agent ends the others, or else this process does."""
        self.is_over = True
        records = RecordRequest({view.rank: view.pid for view in ranks}, self._run_folder.logs)
        if not self._is_failing:
            self._report(culprits, ranks, texts, has_records=records.has_ranks)
        outlive_parent()  # which may be a culprit
        records.wait()
        _kill([culprit.view.pid for culprit in culprits])
        pids = [view.pid for view in ranks]
        wait_until(lambda: not any(map(is_alive, pids)), within_s=_ENDS_WITHIN_S, every_s=0.02)
        _kill(pids)

    def _report(self, culprits: Sequence[Culprit], ranks: Sequence[RankView], texts: dict[int, str], *, has_records: bool) -> None:
        hang = diagnosis.to_failure(culprits, ranks, limit_s=self._limit(culprits[0].view.heartbeat))
        with suppress(OSError):  # a full disk, say, which may be the very reason
            self._run_folder.logs.mkdir(parents=True, exist_ok=True)
            for view in ranks:
                if view.pid in texts:
                    self._run_folder.stacks(view.rank).write_text(texts[view.pid])
            if texts:
                files = f"{self._run_folder.logs.name}/stacks_*.txt"
                hang = replace(hang, stacks=f"{files}, flight_recorder_rank_*" if has_records else files)
        is_first = hang.record(self._run_folder, seconds=time.monotonic() - self._began)
        if is_first and self._request.is_shown and is_last_attempt():
            with suppress(OSError):  # the terminal is closed
                print(hang.screen(self._run_folder), file=sys.stderr, flush=True)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
