"""Progress, speed and new log lines of a run or an evaluation, from the files that it writes meanwhile."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_train.errors import printable
from ddp_train.run_folder.paths import RunFolder, step_folders
from ddp_train.run_folder.times import newest_shares
from ddp_train.run_folder.verdict import Outcome, Verdict
from ddp_train.system.files import json_lines, write_json
from ddp_train.system.folder_lock import is_locked

_TAIL_BYTES = 20_000  # of metrics.jsonl
_NOTE_EVERY_S = 1.0
_CHUNK = 1 << 20  # bytes of a log that are read at a time
_BAR_WIDTH, _SHADES = 24, "█▓▒░"  # of the time's bar, in characters: a shade for each of its largest parts
_JOB = re.compile(r"^[a-z]+-(\d+)")


def newest_record(run_folder: RunFolder) -> dict[str, Any]:
    """Return the newest training record of a run; {} before its first."""
    records = json_lines(run_folder.metrics, last_bytes=_TAIL_BYTES)
    newest = [record for record in records if record.get("split") == "train" and record.get("step")][-1:]
    return newest[0] if newest else {}


def progress_line(record: Mapping[str, Any], *, max_steps: int | None, max_epochs: float | None) -> str:
    """Describe in one line the progress of a run, by its newest record."""
    step, epoch, loss, step_ms = (record.get(name) for name in ("step", "epoch", "loss", "step_ms"))
    parts = [f"step {step}" + (f" of {max_steps}" if max_steps is not None else "")]
    if epoch is not None and max_epochs is not None:
        parts.append(f"epoch {epoch:.2f} of {max_epochs:g}")
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    if step_ms:
        parts += [f"{1000 / step_ms:.3g} steps/s", *rates(record.get("tokens_per_s"), record.get("mfu"))]
        if max_steps is not None and max_steps > record["step"]:
            parts.append(f"{duration((max_steps - record['step']) * step_ms / 1000)} left")
    return ", ".join(parts)


def slow_ranks(run_folder: RunFolder, *, are_still_slow: bool = False) -> list[str]:
    """Return the newest event of each rank of a run that was found slow, a line each."""
    newest: dict[int, tuple[str, str]] = {}
    for event in json_lines(run_folder.events, last_bytes=_TAIL_BYTES):
        if event.get("kind") in ("slow_rank", "slow_rank_over"):
            newest[event["rank"]] = event["kind"], printable(f"step {event['step']}: {event['text']}")
    return [line for kind, line in newest.values() if kind == "slow_rank" or not are_still_slow]


def live_notes(run_folder: RunFolder, best: Mapping[str, tuple[float, int]], *, restarts: int) -> list[str]:
    """Return lines on a run that goes on, for a terminal; `best`: value and step of each metric; `restarts` by its agent."""
    texts = [f"{name.removeprefix('eval/')} {value:.4g} at step {step}" for name, (value, step) in best.items()]
    lines = ["best     " + "  ".join(texts)] if texts else []
    if shares := newest_shares(run_folder):
        shown = [*zip(_SHADES, sorted(shares, key=shares.__getitem__, reverse=True), strict=False)]
        bar = "".join(shade * round(_BAR_WIDTH * shares[part]) for shade, part in shown)
        lines.append(f"time     {bar:{_BAR_WIDTH}}  " + "  ".join(f"{shade} {part} {shares[part]:.0%}" for shade, part in shown))
    if saved := step_folders(run_folder.checkpoints):
        step, path = saved[-1]
        with suppress(OSError):  # removed meanwhile
            lines.append(f"saved    step {step}, {duration(time.time() - path.stat().st_mtime)} ago")
    lines += [f"restarts {restarts}"] if restarts else []
    return lines + [f"slow     {line}" for line in slow_ranks(run_folder, are_still_slow=True)]


def progress_of(run_folder: RunFolder, verdict: Verdict) -> str:
    """Describe in a few words the progress of a run with this verdict."""
    if verdict.outcome is Outcome.DONE:
        return "done"
    if is_locked(run_folder.root):
        record = newest_record(run_folder)
        return f"running, step {record['step']}" if record else "running"
    if run_folder.submitted.exists() and run_folder.read_result() is None:
        return "submitted, not running"
    return f"not running: {verdict.reason}"


def rates(tokens_per_s: float | None, mfu: float | None) -> list[str]:
    """Return the known ones of tokens per second and MFU (the share of the devices' peak) as texts."""
    texts = [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} tokens/s"]
    return texts if mfu is None else [*texts, f"MFU {mfu:.1%}"]


def batch_notes(run_folder: RunFolder, *, step: int, num_batches: int | None) -> Callable[[], None]:
    """Return a function to call before each batch of an evaluation, and after the last one; `num_batches` None: unknown.

    It writes rank 0's progress with the checkpoint of a step into the evaluation's folder, once a second at most.
    """
    begun, started, noted = 0, time.monotonic(), -_NOTE_EVERY_S  # the last one in seconds since the start

    def begin() -> None:
        nonlocal begun, noted
        begun += 1
        elapsed = time.monotonic() - started
        if elapsed - noted < _NOTE_EVERY_S and begun - 1 != num_batches:
            return
        noted = elapsed
        with suppress(OSError):  # a full disk: the evaluation will say so itself
            write_json(run_folder.batches, {"step": step, "done": begun - 1, "of": num_batches, "seconds": elapsed})

    return begin


def evaluation_line(run_folder: RunFolder) -> str:
    """Describe in one line the progress of an evaluation; "" before its first batch."""
    try:
        content = json.loads(run_folder.batches.read_text())
        step, done, of, seconds = content["step"], content["done"], content["of"], content["seconds"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    parts = [f"checkpoint of step {step}", f"batch {done}" + (f" of {of}" if of is not None else "")]
    if done and seconds:
        parts.append(f"{done / seconds:.3g} batches/s")
        if of is not None and of > done:
            parts.append(f"{duration((of - done) * seconds / done)} left")
    return ", ".join(parts)


class LogTail:
    """Reads new lines of a run's logs: an engine's logs (logs/*.out), new files too, or else the log of rank 0.

    `last`: how many bytes of the present content are read first.
    """

    def __init__(self, run_folder: RunFolder, *, last: int = 0) -> None:
        self._run_folder = run_folder
        self._offsets = {path: max(0, path.stat().st_size - last) for path in self._files()}  # how far each file was read

    def lines(self) -> list[str]:
        """Return the complete lines since the last call, prefixed by the machine if several have a log."""
        files = self._files()
        machines = {path: path.stem.split("-", 2)[2] for path in files if path.stem.count("-") > 1}
        lines = []
        for path in files:
            name = f"{machines[path]}: " if path in machines and len(machines) > 1 else ""
            lines += [f"{name}{printable(line)}" for line in self._new_lines(path)]
        return lines

    def _new_lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read(_CHUNK)
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1] or (new if len(new) == _CHUNK else b"")  # a progress bar may never end its line
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()

    def _files(self) -> list[Path]:
        """Return the logs of the newest job, the job's own before those of its machines."""
        jobs = {path: int(match[1]) if (match := _JOB.match(path.name)) else 0 for path in self._run_folder.logs.glob("*.out")}
        newest = [path for path, job in jobs.items() if job == max(jobs.values())]
        rank_log = self._run_folder.rank_log(0)
        return sorted(newest, key=lambda path: (len(path.name), path.name)) or ([rank_log] if rank_log.exists() else [])


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes == 0:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
