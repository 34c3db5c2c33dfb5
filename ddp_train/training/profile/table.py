"""What a recorded window comes to, on one screen: the parts of a step, the operators that take longest, and the communication."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ddp_train.training.profile.marks import PARTS

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
