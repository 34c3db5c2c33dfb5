"""One window of recorded steps on one rank: torch's profiler, or CUDA's record of allocations, and the files that come of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ddp_train.training.profile.table import table

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
    """Write a file that is either all there or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial_{path.name}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
