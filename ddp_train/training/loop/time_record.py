"""Record where the time goes: each rank's parts travel with a record's reduction; rank 0 writes times.jsonl, and all judge alike."""

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddp_train.run_folder.result import Status
from ddp_train.run_folder.times import COMMUNICATION, OTHER, PARTS, added
from ddp_train.system import torchrun_env
from ddp_train.training.loop.trainer import Trainer
from ddp_train.training.record.log_window import Reading
from ddp_train.training.record.logged import Reduction
from ddp_train.training.record.slow_ranks import SlowRanks, Ways, far_machines
from ddp_train.training.record.time_split import DeviceTimeSplit, TimeSplit, why_not_split

_LINES = 1000  # the file grows by so many lines while the time since its first grows by a factor of 2.7; by fewer with many ranks
_RANKS_OF_LINES = 64
_FIXES = {  # all ranks wait for such a rank
    "data": "look at its disk, its network to the data, and loader.num_workers",
    "compute": "look at its clock speed and temperature, and at other processes there",
    "other": "look at callbacks, records and other Python there",
    "network": "look at its cable, its interface (cluster.env.GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and its switch",
}
_FASTER_DATA = "more loader.num_workers, or loader.on_device=true for data that fits; docs/time.md has more"


class TimeRecord:
    """Splits a run's time on this rank, and gives all ranks the split of all. Made on all ranks together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world, self._services = trainer, trainer.world, trainer.services
        self._hosts = self._world.gather_to_main(socket.gethostname())  # of each rank; on rank 0
        self.split = DeviceTimeSplit() if self._world.device.type == "cuda" else TimeSplit()
        modules = [turn.module for turn in trainer.components.turns.values()] or [trainer.components.module]
        self._not_split = why_not_split(trainer.components.strategy, modules, self._world)
        self._slow_ranks = SlowRanks(is_split=not self._not_split)
        self._row = [0.0] * len(PARTS)  # this rank's seconds that no record has yet
        self._rows: list[list[float]] = []  # of all ranks, that no line has yet
        self._step = self._line_step = 0  # up to which records have the time, and lines
        self._first = self._since = self._until = self._taken = 0.0  # monotonic: of the first line, the last, `_step`, now
        self._epoch = 0.0  # where that clock began, in seconds since the epoch
        self._ways: Callable[[], Ways | None] | None = None  # gives what is being measured
        self._far: list[int] = []  # first ranks of the machines whose network was reported; on rank 0

    def register(self) -> None:
        """Hang it on the loop."""
        hooks, step, strategy = self._trainer.hooks, self._trainer.train_step, self._trainer.components.strategy
        step.mark, step.exchange = self.split.mark, self.split.exchange
        if hasattr(own := getattr(strategy, "own", strategy), "mark_exchange"):
            own.mark_exchange = partial(self.split.mark, PARTS[COMMUNICATION])
        self._services.phases.listen(self.split.enter_phase)  # before faults, whose time is that of the phase
        hooks.when_steps_begin.insert(0, self.begin)
        hooks.add_to_reduction.append(self.add_to)
        hooks.at_record.append(self.record)
        hooks.at_end.append(self.end)

    def begin(self) -> None:
        """Called before the first step, and after a rewind."""
        if self._since:
            self._keep_rest(is_lost=True)
            return
        self.split.begin()
        self._step = self._line_step = self._trainer.state.step
        self._since = self._first = time.monotonic()
        self._epoch = time.time() - self._first
        line = {"started": round(self._services.started, 3), "restart": torchrun_env.restart_count() > 0}
        line |= {"queued": self._services.run_folder.submitted.exists(), "step": self._trainer.state.step}
        self._services.records.write_times({**line, "hosts": self._hosts, "parts": PARTS, "not_split": self._not_split})

    def add_to(self, reduction: Reduction) -> None:
        """Add this rank's row to the reduction: the others have zeros in its place."""
        self._taken = time.monotonic()
        (self._row,) = added([self._row], [self.split.take()])
        zeros = [0.0] * len(PARTS)
        reduction.add("time", [each for rank in range(self._world.size) for each in (self._row if rank == self._world.rank else zeros)])

    def record(self, values: dict[str, float], reading: Reading) -> None:
        """Take the rows of all ranks into a record, and report what they show."""
        rows, steps = self._rows_of(reading.sums["time"]), self._trainer.state.step - self._step
        self._keep(rows)
        if self._until - self._since >= (self._until - self._first) / _LINES * max(1.0, len(rows) / _RANKS_OF_LINES):
            self._write()
        self._judge(rows, steps)

    def end(self, status: Status) -> None:
        """Write what is left, as of evaluations and saves after the last record. Collective."""
        self._keep_rest()
        self._services.phases.forget(self.split.enter_phase)
        self.split.end()

    def _keep_rest(self, *, is_lost: bool = False) -> None:
        """Write what no line has yet; in a line of its own what no record has, where a rewind has undone it. Collective."""
        if is_lost:
            if self._rows:
                self._write()
            self._step = self._line_step = self._trainer.state.step
        reduction = Reduction(self._world)
        self.add_to(reduction)
        self._keep(self._rows_of(reduction.sum()["time"]))
        self._write(is_lost=is_lost)

    def _rows_of(self, sums: Sequence[float]) -> list[list[float]]:
        self._row = [0.0] * len(PARTS)
        rows = [list(sums[first : first + len(PARTS)]) for first in range(0, len(sums), len(PARTS))]
        if PARTS[COMMUNICATION] in self._not_split:  # there is that of records alone
            for row in rows:
                row[OTHER], row[COMMUNICATION] = row[OTHER] + row[COMMUNICATION], 0.0
        return rows

    def _keep(self, rows: list[list[float]]) -> None:
        """Keep the rows of a record for a line: where records are many, it takes several."""
        self._rows, self._step, self._until = added(self._rows, rows), self._trainer.state.step, self._taken

    def _write(self, *, is_lost: bool = False) -> None:
        shown = [[None if name in self._not_split else float(f"{s:.4g}") for name, s in zip(PARTS, row, strict=True)] for row in self._rows]
        line: dict[str, Any] = {"step": self._step, "time": round(self._epoch + self._until, 3)}
        line |= {"seconds": round(self._until - self._since, 6), "steps": self._step - self._line_step, "ranks": shown}
        self._services.records.write_times(line | ({"lost": True} if is_lost else {}))
        self._rows, self._line_step, self._since = [], self._step, self._until

    def _judge(self, rows: list[list[float]], steps: int) -> None:
        ranks = self._slow_ranks
        if slow := ranks.look(rows, steps):
            self._report_slow(
                slow.rank, slow.cause, slow.ratio, f"its own time in a step is {slow.ratio:.3g} times the others'", others=slow.others
            )
        for rank in ranks.recovered():
            self._report("slow_rank_over", f"slow     {self._name(rank)} is as fast as the others again", rank=rank, host=self._host(rank))
        if ranks.waits_for_data:
            text = f"data     {ranks.waits_for_data:.0%} of each step is spent waiting for data: {_FASTER_DATA}"
            self._report("waits_for_data", text, share=round(ranks.waits_for_data, 3))
        if ranks.asks_for_ways():
            self._ways = self._services.stop.measure_ways()
        ways = self._ways() if self._ways is not None else None  # on rank 0 alone
        if ways is not None:
            self._ways = None
            self._log_far(far_machines(ways), ways)
        if ranks.waits_no_more:
            self._log_far([])

    def _log_far(self, far: list[int], ways: Ways | None = None) -> None:
        """Log the machines whose network is slow now and was not before, and those of which it is so no more."""
        for rank in far:
            if ways is not None and rank not in self._far:
                way = f"{1e3 * ways.seconds[rank]:.0f} ms to rank {ways.home} and back" if rank != ways.home else "far from all others"
                self._report_slow(rank, "network", None, f"all wait for messages; {way}")
        for rank in set(self._far) - set(far):
            text = f"slow     {self._name(rank)}: its network is as fast as the others' again"
            self._report("slow_rank_over", text, rank=rank, host=self._host(rank), cause="network")
        self._far = far

    def _report_slow(self, rank: int, cause: str, ratio: float | None, why: str, *, others: int = 0) -> None:
        more = f" (and {others} more ranks)" if others else ""
        text = f"slow     {self._name(rank)}{more} by its {cause}{' time' if cause == 'other' else ''}: {why}; {_FIXES[cause]}"
        self._report("slow_rank", text, rank=rank, host=self._host(rank), cause=cause, ratio=ratio and round(ratio, 3), others=others)

    def _report(self, kind: str, text: str, **facts: Any) -> None:
        event = {"time": time.time(), "kind": kind, "step": self._trainer.state.step, **facts}
        if facts.get("cause") != "network":  # rank 0 alone knows of it, and reports are the same on all ranks
            self._trainer.reports.append({**event, "text": text.partition("  ")[2].strip()})
        self._services.records.log_event(event, text)

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if self._hosts else ""

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._host(rank)}"
