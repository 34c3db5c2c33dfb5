"""Record some steps with torch's profiler or CUDA's memory history, and print a table on one screen.

The section `profile` asks for one recording, and the file profile.request in the run's folder for another one, as the section says. Steps
are counted from this start of the run.
Without a recording to come, nothing is called in a step. At log steps rank 0 looks for the file; the others learn of it from the reduction
that a log step makes anyway.
"""

import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from ddp_train.config.schema import ProfileConfig
from ddp_train.distributed.world import World
from ddp_train.run_folder.paths import RunFolder
from ddp_train.system.files import appears_whole
from ddp_train.system.phase import Part, Phase, Phases
from ddp_train.training.loop.hooks import Hooks, RunRequest, StepWatch
from ddp_train.training.loop.train_step import StepMarks

logger = logging.getLogger(__name__)

_PHASES = (Phase.DATA, Phase.EVALUATION, Phase.SAVE)
_MARKS = (Phase.DATA, Part.FORWARD, Part.BACKWARD, Part.COMMUNICATION, Part.OPTIMIZER, Phase.EVALUATION, Phase.SAVE)
"""What a trace names (`TraceMarks`): the phases around a step, and the parts of a step."""

_STEP = "ProfilerStep"
_COLLECTIVES = ("gloo:", "nccl:")  # prefixes of their events on the host
_KERNELS = "nccl"  # prefix of their kernels on a GPU


@dataclass(frozen=True)
class _ProfilePlan:
    """Steps to record on some ranks, after `first` steps."""

    kind: str  # trace | memory (on a CPU) | allocations (memory on a GPU)
    first: int
    steps: int
    ranks: Sequence[int]

    @property
    def begins(self) -> int:
        """The number of steps before recording begins: the step before, if there is one, warms torch's profiler up."""
        return self.first if self.kind == "allocations" else max(0, self.first - 1)


class Profiler:
    """Records some steps of a run on the chosen ranks. Steps that cannot be recorded or written give a warning, and end no run.

    Args:
        config: the section `profile`.
    """

    def __init__(self, config: ProfileConfig, world: World, run_folder: RunFolder, phases: Phases, step_marks: StepMarks) -> None:
        self._config, self._world = config, world
        self._run_folder, self._phases = run_folder, phases
        self._marks = TraceMarks(step_marks, phases)
        self._steps_since_request = 0  # since this start, or since the request, while a recording is to come
        self._recording: Trace | Allocations | None = None
        self._plan = None if config.kind == "off" else self._plan_after(config.start_step)
        self._watch = StepWatch(begin_step=self.begin_step, is_on=self._plan is not None)

    def hooks(self) -> Hooks:
        """Return the profiler's hooks, for the config's recording and later requests."""
        return Hooks(
            before_step=[self._watch],
            requests=[RunRequest(self.is_requested, self.plan_requested)],
            at_end=[lambda status: self.close()],
        )

    def begin_step(self, step: int) -> None:
        """Called before a step, with the number of steps taken; may take a while where a recording ends."""
        plan, steps = self._plan, self._steps_since_request
        self._steps_since_request += 1
        assert plan is not None  # the watch is on
        self._marks.enter(None)
        if steps == plan.first + plan.steps:
            self._end()
        elif self._recording is not None:
            self._recording.next_step()
        elif steps == plan.begins and self._world.rank in plan.ranks:
            self._begin(plan, step)

    def is_requested(self) -> bool:
        """Tell whether this rank sees a request."""
        return self._world.is_main and os.path.exists(self._run_folder.profile_request)  # which never raises

    def plan_requested(self, step: int) -> None:
        """Plan the recording that was requested. Every rank calls it."""
        with suppress(OSError):  # it is gone already, say
            self._run_folder.profile_request.unlink()
        if self._plan is not None:
            self._world.print("profile.request is ignored: another profile is scheduled already")
            return
        self._steps_since_request = 0
        self._plan = self._plan_after(1)
        self._watch.is_on = True
        steps, ranks = f"steps {step + 2} to {step + 1 + self._plan.steps}", ", ".join(map(str, self._plan.ranks))
        self._world.print(f"profile  {steps} are recorded on rank {ranks}: {self._run_folder.as_typed()}/profile")

    def close(self) -> None:
        """Called after the last step."""
        plan = self._plan
        if plan is not None and self._steps_since_request <= plan.first:
            taken = f"the run took {self._steps_since_request} steps, and {plan.first} come before the window"
            self._world.print(f"profile  nothing was recorded: {taken}")
        self._end()

    def _plan_after(self, first: int) -> _ProfilePlan:
        kind: str = self._config.kind if self._config.kind != "off" else "trace"
        if kind == "memory" and self._world.device.type == "cuda":
            kind = "allocations"
        return _ProfilePlan(kind, first, self._config.steps, self._config.ranks)

    def _begin(self, plan: _ProfilePlan, step: int) -> None:
        first = step + 1 + plan.first - plan.begins
        path = self._run_folder.profile / f"rank_{self._world.rank:05d}_step_{first - 1:06d}"
        try:
            if plan.kind == "allocations":
                self._recording = Allocations(path, self._world.device)
            else:
                self._recording = Trace(path, self._world.device, step=step + 1, first=first, has_memory=plan.kind == "memory")
            self._marks.begin()
        except Exception as error:  # another profiler is at work, say
            self._give_up(error)

    def _end(self) -> None:
        recording, started = self._recording, time.perf_counter()
        self._reset()
        if recording is None:
            return
        self._phases.report_progress()
        try:
            if text := recording.end():
                with appears_whole(recording.path.with_name(f"{recording.path.name}.txt")) as file:
                    file.write_text(f"{text}\n")
        except Exception as error:
            self._give_up(error)
            return
        self._phases.report_progress()
        if text:
            name = f"{self._run_folder.as_typed()}/profile/{recording.path.name}"
            print(f"profile  {name}, written in {time.perf_counter() - started:.1f} s\n{text}", flush=True)

    def _give_up(self, error: Exception) -> None:
        self._reset()
        logger.warning("rank %d records no profile: %s: %s", self._world.rank, type(error).__name__, error)

    def _reset(self) -> None:
        self._marks.end()
        self._watch.is_on = False
        self._recording = self._plan = None


class TraceMarks:
    """Marks this rank's phases and the parts of its steps in a trace by name (`_MARKS`), while they are recorded."""

    def __init__(self, step_marks: StepMarks, phases: Phases) -> None:
        self._step_marks, self._phases = step_marks, phases
        self._phase: Phase | None = None
        self._range, self._undo = ExitStack(), ExitStack()

    def begin(self) -> None:
        self._phases.listen(self._enter_phase)
        self._undo.callback(self._phases.forget, self._enter_phase)
        self.enter(None)  # `listen` has marked the present phase, which is over
        self._step_marks.listen(record_function)
        self._undo.callback(self._step_marks.forget, record_function)

    def end(self) -> None:
        self.enter(None)
        self._undo.close()

    def _enter_phase(self, phase: Phase, step: int) -> None:
        self.enter(phase if phase in _PHASES else None)

    def enter(self, phase: Phase | None) -> None:
        """End the present phase and begin another one; None: only end it."""
        if phase != self._phase:  # else another batch of the same evaluation
            self._range.close()
            self._phase = phase
            if phase is not None:
                self._range.enter_context(record_function(phase))


class Trace:
    """Records steps with torch's profiler.

    Args:
        path: of the files, without their endings.
        step: the number of the step that begins, in the trace.
        first: the number of the first step to record. Those before it only warm up: the first steps under a profiler are slow.
    """

    def __init__(self, path: Path, device: torch.device, *, step: int, first: int, has_memory: bool) -> None:
        self.path = path
        self._sort_by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        if has_memory:
            self._sort_by = "self_cpu_memory_usage"

        def schedule(step: int) -> Any:
            return ProfilerAction.WARMUP if step < first else ProfilerAction.RECORD

        self._profile = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else []),
            schedule=schedule,
            record_shapes=True,
            profile_memory=has_memory,
            acc_events=True,  # there is only one cycle; without this, older torch warns that the next one drops its events
        )
        self._profile.step_num = step  # the trace has the run's step numbers
        self._profile.current_action = schedule(step)
        self._profile.start()
        self.next_step = self._profile.step

    def end(self) -> str:
        """Write the trace, and return its table; "" where nothing was recorded."""
        action = self._profile.current_action
        self._profile.stop()
        if action is ProfilerAction.WARMUP:
            return ""
        with appears_whole(self.path.with_name(f"{self.path.name}.pt.trace.json.gz")) as file:
            self._profile.export_chrome_trace(str(file))
        averages = self._profile.key_averages()
        averages[:] = [average for average in averages if not average.is_user_annotation]  # `table` tells those of ours
        return table(self._profile.events(), averages.table(sort_by=self._sort_by, row_limit=12, max_name_column_width=40))


class Allocations:
    """Records the allocations of torch's allocator on a GPU."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self._device = path, device
        self.next_step = lambda: None
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # the newest ones

    def end(self) -> str:
        """Write the allocations, and return torch's memory summary."""
        memory: Any = torch.cuda.memory
        with appears_whole(self.path.with_name(f"{self.path.name}_memory.pickle")) as file:
            memory._dump_snapshot(str(file))
        memory._record_memory_history(enabled=None)
        return torch.cuda.memory_summary(self._device, abbreviated=True)


def table(events: Sequence[Any], operators: str) -> str:
    """Return the table of some steps: the time of their parts, torch's table of their operators, and the time of communication.

    `events`: torch's, of these steps (`profile.events()`).
    """
    on_host = [event for event in events if event.device_type.name == "CPU"]
    steps = [event for event in on_host if event.name.startswith(_STEP)]
    num_steps = len(steps) or 1
    parts = {part: covered_ms(event for event in on_host if event.name == part) for part in _MARKS}
    lines = [
        f"{num_steps} steps, {covered_ms(steps) / num_steps:.3f} ms each, ms a step:",
        "  " + "  ".join(f"{part} {ms / num_steps:.3f}" for part, ms in parts.items() if ms),
        "",
        f"operators in all {num_steps} steps:",
        operators.rstrip(),
        "",
        _communication(events, num_steps),
    ]
    return "\n".join(lines)


def _communication(events: Iterable[Any], num_steps: int) -> str:
    """Return a line with the time of collectives, and on a GPU how much of it overlapped with other kernels."""
    on_device = [event for event in events if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)]
    kernels = [event for event in on_device if not event.name.startswith((_STEP, *_MARKS))]  # without copies of the host's annotations
    collectives = [event for event in kernels or events if event.name.startswith(_KERNELS if kernels else _COLLECTIVES)]
    if not collectives:
        return "communication: none"
    text = f"communication: {covered_ms(collectives) / num_steps:.3f} ms a step"
    computing = [event for event in kernels if not event.name.startswith(_KERNELS)]
    overlap = covered_ms(collectives) + covered_ms(computing) - covered_ms(kernels)
    return f"{text}, {overlap / covered_ms(collectives):.0%} of it overlapped with computing" if kernels else text


def covered_ms(events: Iterable[Any]) -> float:
    """Return how long at least one of the events was running."""
    total, end = 0.0, -math.inf
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3
