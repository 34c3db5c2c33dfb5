"""What a recorded window comes to, on one screen: the parts of a step, the operators that take longest, and the communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_train.training.profile.marks import PARTS

_ROWS = 12
_WIDTH = 56  # of a name
_STEP = "ProfilerStep"
_COLLECTIVES = ("gloo:", "nccl:")  # torch's own marks of them on the host
_NO_OPERATORS = ("user_annotation", "python_function")
_KERNELS = "nccl"  # their kernels on a GPU, whatever follows

Interval = tuple[float, float]
"""Microseconds, from and to."""


@dataclass
class _Operator:
    calls: int = 0
    host_us: float = 0.0
    device_us: float = 0.0


def table(events: Sequence[Any], *, steps: int, memory: Sequence[str] = ()) -> str:
    """Return the table of a window.

    Args:
        events: torch's (`profile.events()`).
        steps: how many of them were recorded.
        memory: lines that come below.
    """
    whole_us = sum(_length(event) for event in events if event.name.startswith(_STEP) and _is_host(event)) or 1.0
    lines = [f"{steps} steps, {whole_us / steps / 1e3:.3f} ms each, ms a step:"]
    parts = {part: sum(_length(event) for event in events if event.name == part and _is_host(event)) for part in PARTS}
    lines.append("  " + "  ".join(f"{part} {us / steps / 1e3:.3f}" for part, us in parts.items() if us))
    lines += ["", *_operators(events, steps=steps), "", _communication(events, steps=steps)]
    return "\n".join([*lines, *memory])


def _operators(events: Iterable[Any], *, steps: int) -> list[str]:
    """Return the lines of the operators that take longest themselves: without those that they call."""
    found: dict[str, _Operator] = {}
    for event in events:
        if _is_operator(event):
            operator = found.setdefault(event.name, _Operator())
            operator.calls += 1
            operator.host_us += event.self_cpu_time_total
            operator.device_us += event.self_device_time_total
    on_device = any(operator.device_us for operator in found.values())

    def key(operator: _Operator) -> float:
        return operator.device_us if on_device else operator.host_us

    whole_us = sum(map(key, found.values())) or 1.0
    title = f"{'operator':<{_WIDTH}}  {'calls':>7}  {'host ms':>9}" + (f"  {'GPU ms':>9}" if on_device else "") + f"  {'share':>6}"
    lines = [f"operators by their own {'GPU' if on_device else 'host'} time, without what they call, a step:", title]
    for name, operator in sorted(found.items(), key=lambda item: -key(item[1]))[:_ROWS]:
        shown = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
        times = [operator.host_us, operator.device_us] if on_device else [operator.host_us]
        columns = "".join(f"  {us / steps / 1e3:>9.3f}" for us in times)
        lines.append(f"{shown:<{_WIDTH}}  {operator.calls / steps:>7g}{columns}  {key(operator) / whole_us:>6.1%}")
    return lines


def _communication(events: Iterable[Any], *, steps: int) -> str:
    """Say how long collectives took, and on a GPU how much of that time other kernels ran."""
    kernels = [(event.name, _interval(event)) for event in events if event.device_type.name == "CUDA" and not _is_mark(event)]
    if kernels:
        sent = union(interval for name, interval in kernels if name.startswith(_KERNELS))
        computed = union(interval for name, interval in kernels if not name.startswith(_KERNELS))
        if not sent:
            return "communication: none"
        overlapped = common(sent, computed)
        share = overlapped / _total(sent)
        return f"communication: {_total(sent) / steps / 1e3:.3f} ms a step, {share:.0%} of it beside computing"
    sent = union(_interval(event) for event in events if event.name.startswith(_COLLECTIVES))
    return f"communication: {_total(sent) / steps / 1e3:.3f} ms a step" if sent else "communication: none"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return for how long two unions are both at work."""
    total, place = 0.0, 0
    for start, stop in some:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < stop:
            total += min(stop, others[at][1]) - max(start, others[at][0])
            at += 1
    return total


def _total(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _interval(event: Any) -> Interval:
    return float(event.time_range.start), float(event.time_range.end)


def _length(event: Any) -> float:
    start, stop = _interval(event)
    return stop - start


def _is_operator(event: Any) -> bool:
    """Tell whether an event is an operator on the host: no name of a part, no function of Python (with stacks), no collective under way."""
    others = event.is_async or event.name == "[memory]" or any(getattr(event, f"is_{kind}", False) for kind in _NO_OPERATORS)
    return _is_host(event) and not others


def _is_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _is_mark(event: Any) -> bool:
    """Tell whether an event on a GPU's time line is the shadow of a name on the host."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith((_STEP, *PARTS))
