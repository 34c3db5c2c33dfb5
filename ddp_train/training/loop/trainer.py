"""The loop: `train`, `train_step`, `evaluate`.

Ordinary code that is meant to be read and owned: all that a plain run does, in order. What a feature adds hangs on the points that `Hooks`
(`hooks.py`) names. What is done in a step is in `train_step.py`. Between two log steps nothing here waits for the device.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from torch import Tensor

from ddp_train import model_log
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.loader.device_copy import copied_ahead
from ddp_train.loader.order import GlobalBatch, epochs
from ddp_train.loader.reader import MicroBatch
from ddp_train.run_folder.result import Status
from ddp_train.system.phase import Part, Phase
from ddp_train.training.loop import evaluation
from ddp_train.training.loop.hooks import Hooks, RunServices
from ddp_train.training.loop.train_step import TrainStep
from ddp_train.training.parts.components import Components
from ddp_train.training.parts.evaluated_weights import weights_to_evaluate
from ddp_train.training.record.log_window import LogWindow, Reading
from ddp_train.training.record.logged import Logged, Reduction
from ddp_train.training.record.loss_monitor import LossMonitor, Rewind
from ddp_train.training.train_state import Best, TrainState


@dataclass(kw_only=True)
class Trainer:
    """Trains the components of one run on this rank.

    All ranks do the same things, for each step in this order:

        data      this rank's micro-batches of the next global batch, each when it is asked for; the loader reads ahead
        step      forward and backward of each, the gradients' all-reduce in the last backward, clipping, optimizer, schedule
        log       every `log_every_steps`: one reduction, one read from the device, the losses are judged, one record
        evaluate  at the end of a period: every sample of the evaluation data once, one record
        save      when it is due: after the evaluation, which may be one of the best, and after the losses were judged
        stop      if it was asked for, with everything saved that continuing needs

    A `Rewind` that `monitor` raises leads back to a checkpoint. What trains or evaluates returns False where a stop came first.
    """

    components: Components
    state: TrainState  # advanced in place
    world: World

    train_step: TrainStep
    log_every_steps: int
    evaluate_every_steps: int | None  # None: at the end of every epoch
    saves_predictions: bool = False  # of each evaluation
    monitor: LossMonitor = field(default_factory=LossMonitor)  # judges the losses

    services: RunServices
    hooks: Hooks = field(default_factory=Hooks)  # what features hang on them (`build/trainer.py`)

    window: LogWindow = field(init=False)  # the steps since the last record, which `train_step` adds
    logged: Logged = field(init=False)  # by callbacks and by the model
    has_stepped: bool = field(init=False, default=False)  # here, wherever the state comes from

    def __post_init__(self) -> None:
        self.window = self.train_step.window
        self.logged = Logged(self.state, [*self.components.turns.by_name])

    def train(self) -> bool:
        """Train from the state to the last step, or until a stop. Collective.

        Returns whether all is done; False after a stop, with everything saved that continuing needs.

        Raises NonFiniteLossError: the loss was NaN or infinite; all ranks raise at the same log step.
        Raises ReplicaError: the ranks' weights are not the same any more.
        """
        micro_batches = self._open_micro_batches()
        while True:
            try:
                with model_log.taken_by(self.logged.sink()):
                    return self._take_steps(micro_batches)
            except Rewind as rewind:  # the data goes on where it is
                self.services.checkpoints.rewind(rewind)

    def end(self, status: Status) -> None:
        """Called when the run has ended in good order, with what result.json will say. Collective."""
        for at_end in self.hooks.at_end:
            at_end(status)

    def _take_steps(self, micro_batches: Iterator[MicroBatch]) -> bool:
        """Train from the state to the last step, or until a stop or a rewind."""
        components, state, hooks = self.components, self.state, self.hooks
        had_ended = state.early_end is not None
        self._begin_steps()
        if not self._evaluate_what_was_pending():
            return False
        if state.early_end is not None and not had_ended:  # a callback ends it here: no step follows that would save this
            self._save()
        while not state.is_over(components.total_steps):
            for watch in hooks.before_step:
                if watch.is_on:
                    with self.window.excluded():
                        watch.begin_step(state.step)
            batch = components.train_loader.order.batch_at(state.position)
            is_log_step = self.is_log_step(state.step + 1)
            grad_norm = self.train_step(self._of_next_step(micro_batches), global_batch_size=batch.size, measures_norm=is_log_step)
            state.step += 1
            state.position += batch.size
            for after_step in hooks.after_step:
                after_step(state.step)
            if not self.has_stepped:
                self.has_stepped = True
                for after_first_step in hooks.after_first_step:
                    after_first_step()
            if is_log_step:
                self._log(grad_norm)  # the ranks agree in it on a callback's stop, as they do in an evaluation
            if not self._finish_step(batch, is_judged=is_log_step):
                return False
        return True

    def _begin_steps(self) -> None:
        """Begin the window of the first steps, and call the hooks `when_steps_begin`: at the start, and after a rewind."""
        self.components.trained_module.train()
        self.window.restart(self.state.saved_window)
        self.logged.restart(self.state.saved_window)
        for begin in self.hooks.when_steps_begin:
            begin()

    def _finish_step(self, batch: GlobalBatch, *, is_judged: bool) -> bool:
        """Evaluate where that is due, then save: the evaluation may be one of the best. False: all stop after this step. Collective."""
        state = self.state
        agreed = self.services.stop.agree_after(state.steps_run)
        goes_on = not agreed.is_last_step
        if self._is_evaluation_due(batch):
            with self.window.excluded():
                goes_on = goes_on and self.evaluate()
            state.evaluation_pending = not goes_on
        is_due = not goes_on or self.services.checkpoints.decide(state.step, is_agreed=agreed.is_save_agreed)
        if is_due or state.is_over(self.components.total_steps):
            if not is_judged:  # weights that are lost must not replace good ones
                self._judge(self.window.read(Reduction(self.world)))
            self._save()
        return goes_on

    def _open_micro_batches(self) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches, after the first one has served for all that comes before the first step. Collective."""
        components, state, hooks = self.components, self.state, self.hooks
        micro_batches = copied_ahead(components.train_loader.micro_batches(state.position), self.world.device)
        if hooks.before_first_step and state.step < components.total_steps:
            first = list(islice(micro_batches, 1))  # of the loader itself: its workers start once, and nothing is read twice
            if first:
                for prepare in hooks.before_first_step:
                    prepare(first[0])
            micro_batches = chain(iter(first), micro_batches)  # given the list itself, `chain` would hold its memory to the end
        for change in hooks.wrap_micro_batches:
            micro_batches = change(micro_batches)
        return micro_batches

    def _of_next_step(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the next step, each when it is asked for: few of them are on the device at a time."""
        step, phases = self.state.step, self.services.phases
        wait_s = 0.0
        num_skipped = 0
        count = self.components.train_loader.num_micro_batches(self.state.position)
        for number in range(count):
            started = time.perf_counter()
            phases.enter(Phase.DATA, step)
            micro_batch = next(micro_batches, None)
            if micro_batch is None:  # on one rank, say: the others would wait for it in the all-reduce
                raise DataError(
                    key="data",
                    happened=f"the data of rank {self.world.rank} ended within step {step + 1},"
                    f" after {number} of its {count} micro-batches",
                    expected="data until the run's last step, on every rank",
                    fix="look for a StopIteration that the data set raises",
                )
            wait_s += time.perf_counter() - started
            num_skipped += len(micro_batch.bad_samples)
            phases.enter(Phase.STEP, step)
            yield micro_batch
        self.window.add_data(wait_s=wait_s, num_skipped=num_skipped)

    def is_log_step(self, step: int) -> bool:
        return step % self.log_every_steps == 0 or step == self.components.total_steps

    def _log(self, grad_norm: Tensor | None) -> None:
        """Reduce once, read the device once, write one record, and begin the next window. Collective."""
        components, window, hooks = self.components, self.window, self.hooks
        reduction = Reduction(self.world)
        memory = reduction.add(components.throughput.memory())
        requests = reduction.add([request.is_made() for request in hooks.requests])
        for add_to_reduction in hooks.add_to_reduction:
            add_to_reduction(reduction)
        logged = self.logged.add_to(reduction)
        with self.train_step.marks.around(Part.COMMUNICATION):
            reading = window.read(reduction, grad_norm)
        assert reading.grad_norm is not None
        loss = self._judge(reading)
        elapsed = time.perf_counter() - window.started
        values = {
            "loss": loss,
            "lr": float(components.scheduler.get_last_lr()[0]),
            "grad_norm": reading.grad_norm,
            "step_ms": 1e3 * elapsed / window.steps,
            "data_wait_ms": 1e3 * reading.data_wait_s / window.steps,
        }
        num_units = reading.num_units[-window.steps :]  # by this process, whose clock it is
        values |= components.throughput.values(samples=window.samples, num_units=num_units, seconds=elapsed, memory=memory.sums)
        for add_to in hooks.at_record:
            add_to(values, reading)
        self._write("train", values | self.logged.reduce_and_reset(self.world, logged))
        for request, num_ranks in zip(hooks.requests, requests.sums, strict=True):
            if num_ranks:
                request.carry_out(self.state.step)
        window.reset()

    def _judge(self, reading: Reading) -> float:
        """Return the mean loss of the window's steps, unless one of them ends the run or leads it back."""
        order, is_scaled = self.components.train_loader.order, self.components.scaler.is_enabled()
        return self.monitor.judge(self.window, reading, self.state, order, is_scaled=is_scaled)

    def _write(self, split: str, values: Mapping[str, float]) -> None:
        state = self.state
        axes = {"step": state.step, "epoch": epochs(self.components.train_loader.order, state.position), "samples": state.position}
        self.services.records.write({"split": split, **axes, "time": time.time(), **values})

    def _evaluate_what_was_pending(self) -> bool:
        """Evaluate the step that the state comes from, where that is left to do. False: a stop came first. Collective.

        - The run was stopped before an evaluation: its checkpoint says that one is pending.
        - It was killed between its last step and its result: it is evaluated again.
        """
        if self.state.evaluation_pending or self.state.is_over(self.components.total_steps):
            if not self.evaluate():
                return False  # the checkpoint has it pending, too
            self.state.evaluation_pending = False
        return True

    def _is_evaluation_due(self, batch: GlobalBatch) -> bool:
        """Tell whether the step of a batch ends a period of evaluation, or the run."""
        state = self.state
        if self.evaluate_every_steps:
            ends_period = state.step % self.evaluate_every_steps == 0
        else:
            ends_period = batch.stop == self.components.train_loader.order.epoch_size
        return ends_period or state.is_over(self.components.total_steps)

    def evaluate(self) -> bool:
        """Evaluate, write a record, keep the best values. False: a stop came first, on all ranks alike. Collective."""
        components, state = self.components, self.state
        if not components.eval_loaders:
            return True
        with weights_to_evaluate(components):
            metrics = evaluation.evaluate(
                components,
                self.world,
                predictions=partial(self.services.run_folder.predictions_of, state.step) if self.saves_predictions else None,
                begins_batch=lambda: self.services.phases.enter(Phase.EVALUATION, state.step),
                is_stopping=self.services.stop.is_asked,
            )
            if metrics is None:
                return False
            for after_evaluation in self.hooks.after_evaluation:
                after_evaluation(metrics)
        for name, goal in components.goals.items():
            if name in metrics and math.isfinite(metrics[name]):
                best = state.best.get(f"eval/{name}")
                if best is None or best.is_beaten_by(metrics[name], goal):
                    state.best[f"eval/{name}"] = Best(metrics[name], state.step)
        self._write("eval", metrics)
        return True

    def _save(self) -> None:
        """Save a checkpoint. Collective."""
        with self.window.excluded():
            self.services.phases.enter(Phase.SAVE, self.state.step)
            for before_save in self.hooks.before_save:
                before_save(self.state.step)
            self.services.checkpoints.save(self.window.to_saved(self.logged))
