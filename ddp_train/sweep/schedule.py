"""Run the jobs of a sweep: as many at a time as there are slots.

They run in this command, in the torchrun that started it, or on an engine. No slot is idle while a job waits, and no job is lost when
another fails. There is one thread: it polls the slots in turn.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ddp_train.config.cluster import ENGINES, engine_name_of
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import SweepConfig
from ddp_train.errors import FINAL, INTERRUPTED, STOPPED, ConfigError
from ddp_train.launch.engine.engine import engine_of, has_queue
from ddp_train.launch.job import Job
from ddp_train.launch.job_runner import Slot
from ddp_train.launch.signals import stop_signals
from ddp_train.run_folder import failure
from ddp_train.run_folder.result import EXIT_CODE_OF_STOP, Status, status_of
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.sweep import Sweep, SweepJob
from ddp_train.sweep.table import SweepScreen
from ddp_train.system import devices

_POLL_S = 0.1


class SweepScheduler:
    """Runs jobs on slots, for as many calls of `run` as a sweeper needs.

    Args:
        sweep: updated, in sweep.json too, with every job that starts or ends.
        on_end: called with each job that ended, for good or to be tried again.
        stops_at: returns when to stop as after SIGTERM, in seconds since the epoch; None: never. Called again with True when that time has
            come: it may have been moved.
    """

    def __init__(
        self,
        sweep: Sweep,
        slots: Sequence[Slot],
        policy: SweepConfig,
        *,
        screen: SweepScreen,
        on_start: Callable[[SweepJob], None],
        on_end: Callable[[SweepJob], None],
        stops_at: Callable[[bool], float | None],
    ) -> None:
        self._sweep, self._slots, self._policy, self._screen = sweep, slots, policy, screen
        self._on_start, self._on_end = on_start, on_end
        self._get_stops_at = stops_at
        self._stops_at = stops_at(False)
        self._running: dict[int, tuple[SweepJob, Job]] = {}  # by the slot's number
        self.stop_code: int | None = None  # the exit code, when a signal ended it
        self.is_stopped = False  # no job is started any more
        self._signal: int | None = None  # the newest stop signal; every slot that has a job gets it

    def run(self, jobs: Sequence[tuple[SweepJob, Job]]) -> None:
        """Run jobs to their end, or until the sweep is stopped."""
        waiting = deque(jobs)
        with stop_signals(self._stop, self._kill):
            while self._running or (waiting and not self.is_stopped):
                for number, slot in enumerate(self._slots):
                    if number not in self._running and waiting and not self.is_stopped:
                        self._start(number, *waiting.popleft())
                    if number in self._running and (exit_code := slot.poll(_POLL_S / len(self._slots))) is not None:
                        retried = self._finish(number, exit_code)
                        waiting.extendleft([retried] if retried else [])
                self._screen.idle()
                if self._stops_at is not None and time.time() >= self._stops_at and not self.is_stopped:
                    self._stops_at = self._get_stops_at(True)
                    if self._stops_at is None or self._stops_at <= time.time():
                        self._screen.say("the walltime ends in cluster.grace_s")
                        self._stop(signal.SIGTERM)

    def close(self) -> None:
        for slot in self._slots:
            slot.end()

    def _start(self, number: int, entry: SweepJob, job: Job) -> None:
        is_on_engine = entry.attempts > 0 and entry.status in (Status.QUEUED, Status.RUNNING)
        entry.status = Status.RUNNING
        entry.attempts += not is_on_engine
        job.run_folder.archive_failure()
        self._sweep.save()
        self._on_start(entry)
        self._slots[number].start(job)
        stop_signal, self._running[number] = self._signal, (entry, job)
        if stop_signal is not None:  # it came since this job was chosen
            self._slots[number].stop(stop_signal)

    def _finish(self, number: int, exit_code: int) -> tuple[SweepJob, Job] | None:
        """Record the end of a job; return it when it is to be tried again."""
        entry, job = self._running.pop(number)
        self._sweep.read_result(entry, self._policy.metric)
        was_stopped = self.stop_code is not None and entry.status in EXIT_CODE_OF_STOP  # perhaps before it could write anything
        if exit_code not in STOPPED and entry.status != Status.COMPLETED and not was_stopped:
            entry.status = Status.FAILED
        self._sweep.save()
        self._on_end(entry)
        if entry.status in EXIT_CODE_OF_STOP:
            self.stop_code = self.stop_code or EXIT_CODE_OF_STOP[entry.status]
            self.is_stopped = True
        elif entry.status == Status.FAILED and not self.is_stopped:
            retries = self._policy.max_retries if self._policy.on_failure == "retry" else 0
            entry.failures += 1
            is_on_engine = job.config.cluster.launcher in ENGINES  # there node programs restart it
            count = AttemptCount(job.run_folder)
            no_progress = count.close_unfinished() if is_on_engine else count.fail()
            if no_progress is not None:
                self._screen.say(no_progress.screen(job.run_folder))
            recorded = failure.load_report(job.run_folder.failure)
            is_final = no_progress is not None or (recorded is not None and recorded.exit_code in FINAL)
            restarts = 0 if is_on_engine else job.config.cluster.max_restarts or 0
            if not is_final and entry.failures <= max(retries, restarts):
                return entry, job
            self.is_stopped = self._policy.on_failure == "stop"
        return None

    def _stop(self, stop_signal: int) -> None:
        """Let the running jobs save and end, and start no other."""
        self.stop_code = EXIT_CODE_OF_STOP[status_of(stop_signal)]
        self.is_stopped = True
        self._send_signal(stop_signal)

    def _kill(self) -> None:
        self.stop_code = INTERRUPTED
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, stop_signal: int) -> None:
        self._signal = stop_signal  # also for a job that is just starting
        for number in self._running:
            self._slots[number].stop(stop_signal)


def is_left_to_a_queue(config: RunConfig, *, plans_all: bool) -> bool:
    """Tell whether all jobs are submitted at once, and the command does not wait for them."""
    return has_queue(engine_name_of(config.cluster)) and plans_all and not config.cluster.wait


def problems(configs: Sequence[RunConfig], settings: SweepConfig, *, plans_all: bool) -> list[ConfigError]:
    """Return errors for two engines, for more jobs at a time than there are GPUs, and for settings that an engine cannot do."""
    engines = list(dict.fromkeys(engine_name_of(config.cluster) for config in configs))
    if len(engines) > 1:
        happened = f"is {' and '.join(config.cluster.launcher for config in configs[:2])} in one sweep"
        return [ConfigError(key="cluster.launcher", happened=happened, expected="one launcher for all jobs")]
    if engines and engines[0] is not None:
        return list(_engine_problems(configs[0], settings, plans_all=plans_all))
    clusters = [config.cluster for config in configs if settings.parallel_jobs > 1]
    on_gpus = [cluster.processes_per_node for cluster in clusters if devices.resolve_device(cluster.device) == "cuda"]
    max_processes = max((devices.processes_per_node(processes, "cuda") for processes in on_gpus), default=0)
    if (wanted := settings.parallel_jobs * max_processes) <= (gpus := len(devices.gpus())):
        return []
    happened = f"{wanted} processes at a time need a GPU each; this machine has {gpus}"
    fix = "fewer jobs at a time, or a smaller cluster.processes_per_node"
    return [ConfigError(key="sweep.parallel_jobs", happened=happened, fix=fix)]


def _engine_problems(config: RunConfig, settings: SweepConfig, *, plans_all: bool) -> Iterator[ConfigError]:
    launcher, jobs = config.cluster.launcher, settings.parallel_jobs
    engine = engine_of(launcher)
    if (allocation := engine.allocation()) is not None:
        happened = f"is {launcher}, but this command runs in job {allocation.id}: a sweep submits its own jobs"
        expected = "the login node; or a sweep on the machines of this job"
        fix = f"-m without cluster={launcher}; or {allocation.starter} ddp-train -m cluster=machines"
        yield ConfigError(key="cluster.launcher", happened=happened, expected=expected, fix=fix)
    if not engine.has_queue and jobs > 1:
        happened = f"is {jobs}, but with cluster.launcher={launcher} each job uses all hosts"
        expected = "1: the jobs run one after another"
        yield ConfigError(key="sweep.parallel_jobs", happened=happened, expected=expected, fix="sweep.parallel_jobs=1")
    if is_left_to_a_queue(config, plans_all=plans_all) and settings.on_failure != "continue":
        happened = f"is {settings.on_failure}, but no process waits for the jobs"
        expected = "continue (a job that fails is started again by its own verdict); or a command that waits"
        yield ConfigError(key="sweep.on_failure", happened=happened, expected=expected, fix="cluster.wait=true")
