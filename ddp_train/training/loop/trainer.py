"""The loop: `train`, `train_step`, `evaluate`.

Ordinary code that is meant to be read and owned. Between two log steps nothing here waits for the device, unless that is some steps behind
(`device_queue.py`). What is done in a step is in `train_step.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train import model_log
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.interfaces import finished, note_size
from ddp_train.loader.device_copy import batch_on, copied_ahead
from ddp_train.loader.order import epochs
from ddp_train.loader.reader import MicroBatch
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.scheduler.every_epoch import EveryEpoch
from ddp_train.scheduler.plateau import Plateau
from ddp_train.training.check.sanity_check import check
from ddp_train.training.check.untouched import untouched
from ddp_train.training.loop import evaluation
from ddp_train.training.loop.callbacks import Callbacks, RunView, Show
from ddp_train.training.loop.device_queue import DeviceQueue, device_queue
from ddp_train.training.loop.replica_check import ReplicaCheck
from ddp_train.training.loop.skip_nonfinite import StepGuard
from ddp_train.training.loop.train_step import TrainStep, one_by_one
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluation_mode import evaluation_mode
from ddp_train.training.profile.profiler import Profiler
from ddp_train.training.record.log_window import LogWindow, Reading
from ddp_train.training.record.logged import Logged
from ddp_train.training.record.loss_monitor import LossMonitor, Rewind
from ddp_train.training.record.records import Record
from ddp_train.training.train_state import TrainState, WindowSums


@dataclass(kw_only=True)
class Trainer:
    """Trains the components of one run on this rank.

    All ranks do the same things, for each step in this order:

        data      this rank's micro-batches of the next global batch, each when it is asked for; the loader reads ahead
        step      forward and backward of each, the gradients' all-reduce in the last backward, clipping, optimizer, schedule;
                  all but the schedule once for each turn, where the parts of an objective take turns
        callbacks their event of each of these, where there are some: after the step, in the evaluation, before the save
        log       every `log_every_steps`: one reduction, one read from the device, the losses are judged, one record
        evaluate  at the end of a period: every sample of the evaluation data once, one record
        save      when it is due: after the evaluation, which may be one of the best, and after the losses were judged
        stop      if it was asked for, with everything saved that continuing needs; a callback's is the end of the run

    Who watches is called: `monitor` judges the losses of a window, `guard` decides whether the optimizer steps, `replicas` compares the
    ranks' weights. Where nobody wants it, `guard` takes every step and `replicas` compares nothing. A `Rewind` that the monitor raises
    leads back to a checkpoint.
    """

    # What is trained, from where on, and on which rank.
    components: Components
    state: TrainState  # advanced in place
    world: World

    # How it is trained.
    log_every_steps: int
    evaluate_every_steps: int | None  # None: at the end of every epoch
    clip_grad_norm: float | None
    sanity_check: bool = False  # before the first step: one batch of training and one of evaluation are tried
    predictions_of: Callable[[int, str], Path] | None = None  # where those of the evaluation after a step go, by the set; None: not saved

    # Whom to ask and to tell.
    write: Callable[[Record], None]  # rank 0 writes, the others drop it
    save: Callable[[WindowSums], None]  # collective; gets what has come since the last record
    saves_after: Callable[[int], bool] = lambda step: False  # whether a checkpoint is due, asked after each step; the same on all ranks
    stops_after: Callable[[int], bool] = lambda step: False  # whether this step is the last for now; the same on all ranks
    is_stopping: Callable[[], bool] = lambda: False  # whether a stop was asked for; not at the same time on all ranks
    rewind: Callable[[Rewind], None] | None = None  # collective; after it the state is that of a checkpoint, but for the data's position
    tracker: PhaseTracker = field(default_factory=PhaseTracker)

    # Who watches.
    monitor: LossMonitor = field(default_factory=LossMonitor)
    guard: StepGuard = field(default_factory=StepGuard)
    replicas: ReplicaCheck = field(default_factory=ReplicaCheck)
    profiler: Profiler = field(default_factory=Profiler)

    after_first_step: Callable[[], None] | None = None  # called once, after the first step that this process takes

    # What callbacks see of the run and ask for, beside all that.
    folder: Path = Path()
    show: Show = lambda name, shown, step: None  # rank 0's images and texts
    settings: Mapping[str, Any] = field(default_factory=dict)  # the callbacks' nodes of the config
    callbacks: Callbacks = field(init=False)
    logged: Logged = field(init=False)  # by them and by the model

    train_step: TrainStep = field(init=False)
    last: dict[str, float] = field(default_factory=dict)  # the newest value of every metric, as `split/name`

    def __post_init__(self) -> None:
        self._begin_window()
        self.logged = Logged(self.state, self.components.turns)
        view = RunView(
            self.components,
            self.state,
            self.world,
            logged=self.logged,
            metrics=self.last,
            folder=self.folder,
            show=self.show,
            settings=self.settings,
        )
        self.callbacks = Callbacks(self.components.callbacks, view)

    def train(self) -> bool:
        """Train from the state to the last step, or until a stop. Collective.

        Returns:
            Whether all is done; False after a stop, with everything saved that continuing needs.

        Raises:
            NonFiniteLossError: the loss was NaN or infinite; all ranks raise at the same log step.
            ReplicaError: the ranks' weights are not the same any more.
        """
        stream = self._begin()
        while True:
            try:
                with model_log.taken_by(self.logged.sink()):
                    return self._train(stream)
            except Rewind as found:  # the data goes on where it is
                if self.rewind is None:
                    raise
                self.rewind(found)
                self.replicas.go_back()

    def _begin(self) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches, after its first one has served for all that comes before the first step. Collective."""
        components, state, world = self.components, self.state, self.world
        stream = copied_ahead(components.train_loader.micro_batches(state.samples), world.device)
        if state.step >= components.total_steps:
            return stream
        is_settled, lengths = state.step > 0 or world.size == 1 or not components.settles(), components.lengths
        wants_batch = self.sanity_check or components.throughput.wants_batch or bool(components.compiled) or lengths is not None
        if is_settled and not wants_batch:
            return stream
        first = list(islice(stream, 1))  # of the loader itself: its workers start once, and nothing is read twice
        if components.throughput.wants_batch and first:
            components.throughput.see(note_size(finished(first[0].batch), first[0].samples))
        if self.sanity_check:
            check(components, first, world, samples=state.samples, predicts=self.predictions_of is not None)
        if not is_settled and first:
            with untouched(components, world.device):
                components.rebuild_buckets(world, first[0])
        as_taken = first if lengths is None else [lengths.cut(each, state.step) for each in first]  # refuses what cannot be cut
        if components.compiled and first:
            self._compile(as_taken[0])
        return one_by_one(first, stream)

    def _compile(self, first: MicroBatch) -> None:
        """Let what is compiled meet its first batches while the run still starts, and has its time to. Collective."""
        components, world = self.components, self.world
        with untouched(components, world.device):
            components.module.train()
            components.try_step(world, first)
            evaluated = components.eval_loader.peek() if components.eval_loader is not None else None
            if evaluated is not None and not components.computes_together:  # there a rank without a batch would be missed
                with evaluation.as_evaluated(components), components.amp.autocast(world.device):
                    batch = batch_on(world.device, evaluated)
                    components.examine(batch, predicts=self.predictions_of is not None)
        components.compiled.end_warm_up()

    def _train(self, stream: Iterator[MicroBatch]) -> bool:
        """Train from the state to the last step, or until a stop or a rewind."""
        components, state, tracker, callbacks, profiler = self.components, self.state, self.tracker, self.callbacks, self.profiler
        order, every = components.train_loader.order, self.evaluate_every_steps
        components.module.train()
        counts_epochs = self._reach_epoch()
        self._begin_window()
        queue = device_queue(self.world.device, tracker)
        # Who does nothing after a step is not told of it: with steps of a millisecond each call shows.
        told = [each.after_step for each, idle in ((queue, DeviceQueue), (self.replicas, ReplicaCheck)) if type(each) is not idle]
        components.strategy.begin(components.trained)
        if components.strategy.has_local_weights:
            told.insert(0, components.strategy.after_step)
        self.logged.go_on_from(state.window)
        was_stopped = state.stopped is not None
        callbacks.start()
        if state.owes_evaluation or self._is_over():  # or killed between its last step and its result
            if not self.evaluate():
                return False  # the checkpoint that we come from owes it, too
            state.owes_evaluation = False
        if state.stopped is not None and not was_stopped:
            self._save()
        is_over = self._is_over()
        while not is_over:
            if profiler.is_on:
                self._begin_recorded_step()
            batch = order.batch_at(state.samples)
            is_log_step = (state.step + 1) % self.log_every_steps == 0 or state.step + 1 == components.total_steps
            size = batch.size
            grad_norm = self.train_step(self._micro_batches(stream), global_batch_size=size, measures_norm=is_log_step)
            state.step += 1
            state.samples += size
            if counts_epochs:
                self._reach_epoch()
            for after_step in told:
                after_step(state.step)
            if (tell := self.after_first_step) is not None:
                self.after_first_step = None
                tell()
            if callbacks.has_steps:
                callbacks.step(is_log_step=is_log_step)
            if is_log_step:
                self._log(grad_norm)
                is_over = self._is_over()  # the last one is a log step, and a callback's stop is agreed on in the log

            stops = self.stops_after(state.steps_taken)
            if is_over or (state.step % every == 0 if every else batch.stop == order.epoch_size):
                started = time.perf_counter()
                stops = stops or not self.evaluate()
                is_over = self._is_over()  # or agreed on in an evaluation
                state.owes_evaluation = stops
                self.window.leave_out(started)
            saves = self.saves_after(state.step)  # after the evaluation: it may be one of the best
            if stops or saves or is_over:
                if not is_log_step:  # else it is known: weights that are lost must not replace good ones
                    self._judge(self.window.read(self.world))
                self._save()
                is_over = self._is_over()
            if stops:
                return False
        return True

    def _begin_window(self) -> None:
        """Take steps from here on into a window that goes on from the state's."""
        components, state, world, strategy = self.components, self.state, self.world, self.components.strategy
        self.train_step = TrainStep(
            components=components,
            state=state,
            world=world,
            clip_grad_norm=self.clip_grad_norm,
            guard=self.guard,
            steps_alone=strategy.steps_alone,
            window=LogWindow(world.device, state.window, turns=components.turns, own_weights=strategy.steps_alone),
        )

    @property
    def window(self) -> LogWindow:
        """The steps since the last record."""
        return self.train_step.window

    def _is_over(self) -> bool:
        """Tell whether there is no step left to take."""
        return self.state.step >= self.components.total_steps or self.state.stopped is not None

    def _begin_recorded_step(self) -> None:
        """Tell the profiler, which may write files now: their time is no step's."""
        started = time.perf_counter()
        self.profiler.begin_step(self.state.step)
        self.window.leave_out(started)

    def _save(self) -> None:
        """Save a checkpoint. Collective."""
        started = time.perf_counter()
        self.tracker.enter(Phase.SAVE, self.state.step)
        self.callbacks.save()
        self.replicas.before_save(self.state.step)
        self.save(self.window.sums(self.logged))
        self.window.leave_out(started)

    def _reach_epoch(self) -> bool:
        """Let a scheduler that counts epochs have the rate of the one that the data is in; tell whether there is such a scheduler."""
        scheduler, epoch_size = self.components.scheduler, self.components.train_loader.order.epoch_size
        if not isinstance(scheduler, EveryEpoch):
            return False
        assert epoch_size is not None  # build has seen to it
        scheduler.reach(self.state.samples // epoch_size)
        return True

    def _micro_batches(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the next step, each when it is asked for: few of them are on the device at a time."""
        step, window, tracker, lengths = self.state.step, self.window, self.tracker, self.components.lengths
        parts = self.components.train_loader.micro_steps(self.state.samples)
        for number in range(parts):
            started = time.perf_counter()
            tracker.enter(Phase.DATA, step)
            micro_batch = next(stream, None)
            if micro_batch is None:  # on one rank, say: the others would wait for it in the all-reduce
                raise DataError(
                    key="data",
                    happened=f"the data of rank {self.world.rank} ended within step {step + 1},"
                    f" after {number} of its {parts} micro-batches",
                    expected="data that goes on until the run's last step, on every rank",
                    fix="look for a StopIteration that the data set raises",
                )
            window.data_wait_s += time.perf_counter() - started
            if micro_batch.skipped:
                window.skipped += len(micro_batch.skipped)
            tracker.enter(Phase.STEP, step)
            yield micro_batch if lengths is None else lengths.cut(micro_batch, step)

    def _log(self, grad_norm: Tensor | None) -> None:
        """Reduce once, read the device once, write one record, and begin the next window. Collective."""
        components, window = self.components, self.window
        memory = components.throughput.memory()
        reading = window.read(self.world, grad_norm, self.logged, beside=[self.profiler.is_requested(), *memory])
        num_asked, *memory = reading.beside
        assert reading.grad_norm is not None
        loss = self._judge(reading)
        elapsed = time.perf_counter() - window.started
        values = {
            "loss": loss,
            "lr": float(components.scheduler.get_last_lr()[0]),
            "grad_norm": reading.grad_norm,
            "step_ms": 1e3 * elapsed / window.steps,
            "data_wait_ms": 1e3 * window.data_wait_s / window.steps,
        }
        taken = reading.weights[-window.steps :]  # by this process, whose clock it is
        values |= components.throughput.values(samples=window.samples, weights=taken, seconds=elapsed, memory=memory)
        if components.lengths is not None and components.lengths.at(self.state.step - 1) < components.lengths.whole:
            values.pop("mfu", None)  # its operations are those of whole windows
        values |= {f"samples/{name}": count for name, count in components.train_loader.used(self.state.samples).items()}
        values |= components.compiled.values()
        if components.train_loader.skips:
            values["skipped_samples"] = reading.skipped
        if self.guard.needs_norm:
            values["skipped_steps"] = window.skipped_steps
        self._write("train", values | window.turn_means(reading) | self.logged.settle(reading.logged, self.world))
        if num_asked:
            self.profiler.start_window(self.state.step)
        window.begin_again()

    def _judge(self, reading: Reading) -> float:
        """Return the mean loss of the window's steps, unless one of them ends the run or leads it back."""
        components = self.components
        return self.monitor.judge(self.window, reading, self.state, components.train_loader.order, is_scaled=components.scaler.is_enabled())

    def evaluate(self) -> bool:
        """Evaluate, write a record and keep the best values; False: a stop came before it was done, on all ranks alike. Collective."""
        components, state = self.components, self.state
        if not components.eval_loaders:
            return True
        with evaluation_mode(components.optimizer), evaluation.joined(components):
            metrics = evaluation.evaluate(
                components,
                self.world,
                predictions=partial(self.predictions_of, state.step) if self.predictions_of else None,
                begins_batch=lambda: self.tracker.enter(Phase.EVALUATION, state.step),
                is_stopping=self.is_stopping,
            )
            if metrics is None:
                return False
            metrics |= self.callbacks.evaluation(metrics)
        if isinstance(components.scheduler, Plateau):
            components.scheduler.follow(self.world.from_main(metrics))  # a float that differs in its last bit would part the ranks' rates
        for name, goal in components.goals.items():
            if name in metrics and math.isfinite(metrics[name]):
                best = state.best.get(f"eval/{name}")
                if best is None or (metrics[name] > best["value"] if goal == "max" else metrics[name] < best["value"]):
                    state.best[f"eval/{name}"] = {"value": metrics[name], "step": state.step}
        self._write("eval", metrics)
        return True

    def _write(self, split: str, values: Mapping[str, float]) -> None:
        state = self.state
        epoch = epochs(self.components.train_loader.order, state.samples)
        self.last |= {f"{split}/{name}": value for name, value in values.items()}
        self.write({"split": split, "step": state.step, "epoch": epoch, "samples": state.samples, "time": time.time(), **values})
