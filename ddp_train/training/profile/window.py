"""One window of recorded steps on one rank: torch's profiler, or CUDA's record of allocations, and the files that come of it."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ddp_train.training.profile import table as profile_table

_MOST_ALLOCATIONS = 100_000  # that are kept, the newest ones
_KINDS = ("parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd", "other")
"""Of memory, in the order of torch's timeline."""
_MIB = 2.0**20


class Recording(Protocol):
    """Steps that are being recorded."""

    def next_step(self) -> None:
        """Say that a step has ended and the next one begins."""

    def end(self) -> str:
        """Stop, write the files, and return a table for people; "": nothing was recorded."""


@dataclass(frozen=True)
class Span:
    """Which steps are recorded."""

    number: int  # of the step that begins, as the trace will call it
    warmup: int  # steps that are not kept: the first ones under a profiler are slow
    steps: int  # that are


def record(kind: str, path: Path, device: torch.device, span: Span) -> Recording:
    """Begin to record.

    Args:
        kind: trace | memory.
        path: of the files, without their endings.
    """
    if kind == "memory" and device.type == "cuda":
        return _Allocations(path, device, warmup=span.warmup)
    return _Trace(path, device, span, has_memory=kind == "memory")


class _Trace:
    """Records by torch's profiler."""

    def __init__(self, path: Path, device: torch.device, span: Span, *, has_memory: bool) -> None:
        first = span.number + span.warmup
        last = first + span.steps - 1

        def schedule(step: int) -> Any:
            if step < first:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.NONE

        self._path, self._has_memory, self._first = path, has_memory, first
        self._text = ""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._profile = profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=has_memory,
            with_stack=has_memory,  # by which torch tells what memory is for
            acc_events=True,  # there is one cycle, and older torch warns where its events would make way for the next one's
        )
        self._profile.step_num, self._profile.current_action = span.number, schedule(span.number)  # its steps have the numbers of ours
        self._profile.start()

    def next_step(self) -> None:
        self._profile.step()

    def end(self) -> str:
        self._profile.stop()
        return self._text

    def _write(self, recorded: Any) -> None:
        """Write what was recorded (torch calls it when the last step is over, or recording is stopped)."""
        _whole(self._path.with_name(f"{self._path.name}.pt.trace.json.gz"), lambda file: recorded.export_chrome_trace(str(file)))
        events = recorded.events()
        steps = sum(event.name.startswith("ProfilerStep") for event in events) or 1
        memory = self._write_memory(recorded) if self._has_memory else []
        self._text = profile_table.table(events, steps=steps, memory=memory)
        _whole(self._path.with_name(f"{self._path.name}.txt"), lambda file: file.write_text(f"{self._text}\n"))

    def _write_memory(self, recorded: Any) -> list[str]:
        """Write the time line of memory by kind as a trace, and return a line of the moment when most was taken."""

        taken: list[list[int]] = []

        def export(file: Path) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # for CUDA there is a better one, for a CPU there is none
                recorded.export_memory_timeline(str(file), device="cpu")
            with gzip.open(file, "rt") as stream:
                times, sizes = json.load(stream)
            taken.extend(sizes)
            counters = [
                {"name": "memory (bytes)", "ph": "C", "pid": os.getpid(), "ts": time, "args": dict(zip(_KINDS, each[1:], strict=True))}
                for time, each in zip(times, sizes, strict=True)
            ]
            with gzip.open(file, "wt") as stream:
                json.dump({"traceEvents": counters}, stream)

        _whole(self._path.with_name(f"{self._path.name}_memory.json.gz"), export)
        most = max(taken, key=sum, default=[0] * (1 + len(_KINDS)))
        shares = "  ".join(f"{kind} {size / _MIB:.1f}" for kind, size in zip(_KINDS, most[1:], strict=True) if size > 0)
        return [f"memory at most: {sum(most) / _MIB:.1f} MiB: {shares}"]


class _Allocations:
    """Records what torch's allocator does on a GPU."""

    def __init__(self, path: Path, device: torch.device, *, warmup: int) -> None:
        self._path, self._device = path, device
        self._before = warmup  # steps that are not recorded
        self._begin()

    def next_step(self) -> None:
        if self._before:
            self._before -= 1
            self._begin()

    def end(self) -> str:
        if self._before:
            return ""
        _whole(self._path.with_name(f"{self._path.name}_memory.pickle"), lambda file: torch.cuda.memory._dump_snapshot(str(file)))
        torch.cuda.memory._record_memory_history(enabled=None)
        text = torch.cuda.memory_summary(self._device, abbreviated=True)
        _whole(self._path.with_name(f"{self._path.name}.txt"), lambda file: file.write_text(f"{text}\n"))
        return text

    def _begin(self) -> None:
        if not self._before:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file that is either all there or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial_{path.name}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
