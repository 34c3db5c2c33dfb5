"""One window of recorded steps on one rank: torch's profiler or CUDA's record of allocations, its files, and a table on one screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "save")
"""The parts of a step that a trace has by name (`profiler.Marks`)."""

_MAX_ALLOCATIONS = 100_000  # that are kept, the newest ones


class _Trace:
    """Records by torch's profiler."""

    def __init__(self, path: Path, device: torch.device, *, step: int, recorded: range, has_memory: bool) -> None:
        self.path, self._has_memory = path, has_memory
        self._text = ""
        first, last = recorded[0], recorded[-1]

        def schedule(step: int) -> Any:
            if step < first:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.NONE

        self._profile = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else []),
            schedule=schedule,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=has_memory,
            acc_events=True,  # there is one cycle, and older torch warns where its events would make way for the next one's
        )
        self._profile.step_num, self._profile.current_action = step, schedule(step)  # its steps have the numbers of ours
        self._profile.start()

    def next_step(self) -> None:
        self._profile.step()

    def end(self) -> str:
        self._profile.stop()
        return self._text

    def _write(self, recorded: Any) -> None:
        """Write what was recorded (torch calls it when the last step is over, or recording is stopped)."""
        _write_whole(self.path.with_name(f"{self.path.name}.pt.trace.json.gz"), lambda file: recorded.export_chrome_trace(str(file)))
        if self._has_memory:
            self._text = recorded.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=12, max_name_column_width=40)
        else:
            self._text = table(recorded.events())
        _write_whole(self.path.with_name(f"{self.path.name}.txt"), lambda file: file.write_text(f"{self._text}\n"))


class _Allocations:
    """Records what torch's allocator does on a GPU."""

    def __init__(self, path: Path, device: torch.device, *, warmup: int) -> None:
        self.path, self._device = path, device
        self._steps_before = warmup  # which are not recorded
        self._begin()

    def next_step(self) -> None:
        if self._steps_before:
            self._steps_before -= 1
            self._begin()

    def end(self) -> str:
        if self._steps_before:
            return ""
        memory: Any = torch.cuda.memory
        _write_whole(self.path.with_name(f"{self.path.name}_memory.pickle"), lambda file: memory._dump_snapshot(str(file)))
        memory._record_memory_history(enabled=None)
        text = torch.cuda.memory_summary(self._device, abbreviated=True)
        _write_whole(self.path.with_name(f"{self.path.name}.txt"), lambda file: file.write_text(f"{text}\n"))
        return text

    def _begin(self) -> None:
        if not self._steps_before:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)


Recording = _Trace | _Allocations
"""Steps that are being recorded. `next_step` begins another one; `end` writes the files and returns a table for people, "" of nothing."""


def start_recording(kind: str, path: Path, device: torch.device, *, step: int, recorded: range) -> Recording:
    """Begin to record.

    Args:
        kind: trace | memory.
        path: of the files, without their endings; after a restart a run may come to the same step again, and gets NAME_2.
        step: the number of the step that begins, as the trace will call it.
        recorded: the steps that are kept. Those before them are not: the first ones under a profiler are slow.
    """
    name, number = path.name, 1
    while any(path.parent.glob(f"{path.name}[._][!0-9]*")):
        number += 1
        path = path.with_name(f"{name}_{number}")
    if kind == "memory" and device.type == "cuda":
        return _Allocations(path, device, warmup=recorded[0] - step)
    return _Trace(path, device, step=step, recorded=recorded, has_memory=kind == "memory")


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial_{path.name}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


_ROWS = 12
_WIDTH = 56  # of a name
_STEP = "ProfilerStep"
_COLLECTIVES = ("gloo:", "nccl:")  # torch's own marks of them on the host
_KERNELS = "nccl"  # their kernels on a GPU, whatever follows


def table(events: Sequence[Any]) -> str:
    """Return the table of a window of torch's events (`profile.events()`)."""
    on_host = [event for event in events if event.device_type.name == "CPU"]
    steps = [event for event in on_host if event.name.startswith(_STEP)]
    num_steps = len(steps) or 1
    lines = [f"{num_steps} steps, {_total_ms(steps) / num_steps:.3f} ms each, ms a step:"]
    parts = {part: _total_ms(event for event in on_host if event.name == part) for part in PARTS}
    lines.append("  " + "  ".join(f"{part} {ms / num_steps:.3f}" for part, ms in parts.items() if ms))
    return "\n".join([*lines, "", *_operators(on_host, num_steps), "", _communication(events, num_steps)])


def _operators(events: Iterable[Any], num_steps: int) -> list[str]:
    """Return the lines of the operators that take longest themselves: without those that they call."""
    totals: dict[str, list[float]] = {}  # by name: calls, ms on the host, ms on the device
    for event in events:
        if not (event.is_async or event.name == "[memory]" or getattr(event, "is_user_annotation", False)):
            total = totals.setdefault(event.name, [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, event.self_cpu_time_total / 1e3, event.self_device_time_total / 1e3)):
                total[place] += value / num_steps
    on_device = any(device for _, _, device in totals.values())
    by = 2 if on_device else 1
    whole = sum(total[by] for total in totals.values()) or 1.0
    heads = ["calls", "host ms", *(["GPU ms"] if on_device else []), "share"]
    widths = [7, 9, *([9] if on_device else []), 6]
    lines = [
        f"operators by their own {'GPU' if on_device else 'host'} time, without what they call, a step:",
        f"{'operator':<{_WIDTH}}" + "".join(f"  {head:>{width}}" for head, width in zip(heads, widths, strict=True)),
    ]
    for name, total in sorted(totals.items(), key=lambda item: -item[1][by])[:_ROWS]:
        shown = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
        times = "".join(f"  {ms:>9.3f}" for ms in total[1 : by + 1])
        lines.append(f"{shown:<{_WIDTH}}  {total[0]:>7g}{times}  {total[by] / whole:>6.1%}")
    return lines


def _communication(events: Iterable[Any], num_steps: int) -> str:
    """Say how long collectives took, and on a GPU how much of that time other kernels ran."""
    kernels = [event for event in events if event.device_type.name == "CUDA" and not _is_mark(event)]
    sent = [event for event in kernels if event.name.startswith(_KERNELS)]
    if not kernels:
        sent = [event for event in events if event.name.startswith(_COLLECTIVES)]
    if not sent:
        return "communication: none"
    text = f"communication: {covered_ms(sent) / num_steps:.3f} ms a step"
    if not kernels:
        return text
    computed = [event for event in kernels if not event.name.startswith(_KERNELS)]
    both = covered_ms(sent) + covered_ms(computed) - covered_ms(kernels)
    return f"{text}, {both / covered_ms(sent):.0%} of it beside computing"


def covered_ms(events: Iterable[Any]) -> float:
    """Return for how long at least one of the events was under way."""
    total, end = 0.0, -math.inf
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def _total_ms(events: Iterable[Any]) -> float:
    return float(sum(event.time_range.end - event.time_range.start for event in events)) / 1e3


def _is_mark(event: Any) -> bool:
    """Tell whether an event on a GPU's time line is the shadow of a name on the host."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith((_STEP, *PARTS))
