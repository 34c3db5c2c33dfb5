"""One evaluation on one rank: a checkpoint of a run, or each as it comes, scored or predicted from. Nothing is trained.

It has a folder of its own below the run's: metrics.jsonl, result.json, logs and predictions are there, and nothing of the run is touched.
So it may run beside the training. A stop ends it at once: nothing is lost that cannot be had again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.verify import COMPLETE, CheckpointError, verify, verify_together
from ddp_train.config.saved import answers_of
from ddp_train.distributed.world import World
from ddp_train.errors import DONE, UserError, printable
from ddp_train.interfaces import MetricWriter
from ddp_train.job import Job, Task
from ddp_train.loader.loader import EvalLoader
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.rank import environment, summary
from ddp_train.rank.stop import Stop
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.progress import BatchNotes, progress_of
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.starts import end_start
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.training.build.build import build_evaluated
from ddp_train.training.inference.finished_run import records
from ddp_train.training.inference.predict import predict
from ddp_train.training.instantiate import build_writers
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.components import Evaluated
from ddp_train.training.record.records import Records
from ddp_train.training.state.data_identity import known_meaning
from ddp_train.training.state.weights import put_weights, read_weights
from ddp_train.training.train_state import TrainState

LOOK_EVERY_S = 2.0
_SAY_EVERY_S = 300.0


def evaluate_job(job: Job, world: World, state: TrainState, stop: Stop, tracker: PhaseTracker) -> int:
    """Evaluate a run that has saved, or predict with it; result.json has what came of it. Collective.

    Args:
        state: gets the step of the checkpoint at hand, so that a failure can be told with it.
        stop: is asked nothing: a stop ends the ranks at once.

    Returns:
        The exit code of `ddp-train`.
    """
    started, task = time.monotonic(), job.task
    assert task is not None
    with environment.recorded(job, world):
        if world.is_main:
            print(summary.opening(job, world), flush=True)
        known = known_meaning(Path(task.run if task.watches else task.checkpoint)) if world.is_main else {}
        answers, meaning = world.from_main((answers_of(Path(task.run)), known) if world.is_main else None)
        components = build_evaluated(job.config, world, answers, meaning)
    log = _Log(job, world, tracker)
    metrics: dict[str, float] = {}
    for checkpoint in _checkpoints(task, log, world, tracker):
        state.step = int(checkpoint.name.removeprefix("step_"))
        tracker.enter(Phase.START, state.step)
        if problem := _load(checkpoint, components, state, world, tracker, is_verified=not task.watches):
            if not task.watches:
                raise UserError(key="RUN", happened=f"{checkpoint}: {problem}", expected="a checkpoint that is complete and undamaged")
            if world.is_main:
                print(f"checkpoint {checkpoint.name} is left out: {problem}", flush=True)
            continue
        if world.is_main:
            print(f"weights  of {checkpoint}", flush=True)
        metrics = _work(job, task, components, state, world, tracker)
        log.write(state, metrics)
    tracker.enter(Phase.END, state.step)
    world.barrier()
    if world.is_main:
        log.close()
        last = {f"eval/{name}": value for name, value in metrics.items()}
        seconds = round(time.monotonic() - started, 3)
        result = Result(
            status=Status.COMPLETED, step=state.step, samples=state.samples, metrics={"last": last, "best": {}}, seconds=seconds
        )
        result.write(job.run_folder.result)
        end_start(job.run_folder)
        print(summary.evaluated(job, metrics), flush=True)
    world.barrier()  # nobody leaves before it is written
    return DONE


def _work(job: Job, task: Task, components: Evaluated, state: TrainState, world: World, tracker: PhaseTracker) -> dict[str, float]:
    """Score or predict with the weights that are loaded, and return the metrics. Collective."""
    folder_of, loaders = partial(job.run_folder.predictions_of, state.step), components.eval_loaders.values()
    counts = [len(loader) if isinstance(loader, EvalLoader) else None for loader in loaders]
    num_batches = None if None in counts else sum(filter(None, counts))
    notes = BatchNotes(job.run_folder, step=state.step, num_batches=num_batches) if world.is_main else None

    def begins_batch() -> None:
        tracker.enter(Phase.EVALUATION, state.step)
        if notes is not None:
            notes.begin()

    if task.predicts:
        count = predict(components, world, folder_of(), begins_batch=begins_batch)
        if world.is_main:
            print(
                f"predicted {count:,} samples: {RunFolder(folder_of()).shown()}/*.npy, one row for each in the data set's order", flush=True
            )
        return {}
    wants_rows = job.config.evaluation.save_predictions
    metrics = evaluate(components, world, predictions=folder_of if wants_rows else None, begins_batch=begins_batch)
    assert metrics is not None  # a stop ends the process
    return metrics


def _load(checkpoint: Path, components: Evaluated, state: TrainState, world: World, tracker: PhaseTracker, *, is_verified: bool) -> str:
    """Put the weights of a checkpoint into the model on all ranks; return what is wrong with it, or "". Collective.

    Rank 0 alone reads the weights, and gives them to the others: a checkpoint that its run removes meanwhile is missed by all ranks alike.
    Of a model that is cut among the ranks each reads its own rows, and a checkpoint that is removed meanwhile ends the evaluation.
    """
    found = components.modules
    problem = "" if is_verified else verify_together(checkpoint, world, on_progress=tracker.move)
    if components.computes_together:
        if not problem:
            weights = read_weights(checkpoint, world, found)
            put_weights(checkpoint, weights, found)
            state.samples = int(weights["state"]["samples"])
        return problem
    if world.is_main and not problem:
        try:
            weights = read_weights(checkpoint)
            put_weights(checkpoint, weights, found)
            state.samples = int(weights["state"]["samples"])
        except CheckpointError as error:
            problem = error.happened
        except OSError as error:
            problem = f"{error.filename or checkpoint.name}: {error.strerror}"
    problem = world.from_main(problem)
    for module in found.values() if not problem else ():
        own: dict[str, Any] = module.state_dict()
        world.copy_from_main([value for value in own.values() if isinstance(value, Tensor)])
        others = world.from_main({name: value for name, value in own.items() if not isinstance(value, Tensor)})
        if others and not world.is_main:
            module.load_state_dict({**own, **others})
    return str(problem)


def _checkpoints(task: Task, log: _Log, world: World, tracker: PhaseTracker) -> Iterator[Path]:
    """Yield the checkpoint that was asked for, or each one of the run, the oldest first, until no more will come. Collective."""
    if not task.watches:
        yield world.from_main(
            catalog.find(Path(task.checkpoint), partial(verify, on_progress=tracker.move), key="RUN") if world.is_main else None
        )
        return
    watch = CheckpointWatch(Path(task.run), seen=log.steps())
    while True:
        tracker.move()
        checkpoint, is_over = world.from_main(watch.next_checkpoint() if world.is_main else None)
        if is_over:
            return
        if checkpoint is not None:
            yield checkpoint
        else:
            time.sleep(LOOK_EVERY_S)


class CheckpointWatch:
    """Finds each checkpoint of a run once, the oldest first; one that its run has saved again, after it went back, once more (rank 0).

    Args:
        seen: steps of checkpoints that are evaluated already, as they are now.
    """

    def __init__(self, run: Path, *, seen: Collection[int] = ()) -> None:
        self._run_folder = RunFolder(run)
        self._marks = {entry.step: mark for entry in self._saved() if entry.step in seen and (mark := _mark(entry.path))}
        self._said_at = time.monotonic()

    def next_checkpoint(self) -> tuple[Path | None, bool]:
        """Return the next checkpoint, if it is there, and whether there will be no more."""
        verdict = verdict_of(self._run_folder)  # asked first: what is saved then is all that there will be
        for entry in self._saved():
            mark = _mark(entry.path)
            if mark and self._marks.get(entry.step) != mark:
                self._marks[entry.step] = mark
                return entry.path, False
        is_over = verdict.outcome is not Outcome.AGAIN
        if not is_over and time.monotonic() > self._said_at + _SAY_EVERY_S:
            print(printable(f"waiting for {self._run_folder.shown()}: {progress_of(self._run_folder, verdict)}"), flush=True)
            self._said_at = time.monotonic()
        return None, is_over

    def _saved(self) -> list[catalog.CatalogEntry]:
        return catalog.saved(self._run_folder.checkpoints)


def _mark(checkpoint: Path) -> str:
    """Return what tells a checkpoint from another one of the same step; "" where it has just been removed."""
    with suppress(OSError):
        return (checkpoint / COMPLETE).read_text()
    return ""


class _Log:
    """Where the numbers of an evaluation go: to the run's kinds of metric writers, in the evaluation's own folder."""

    def __init__(self, job: Job, world: World, tracker: PhaseTracker) -> None:
        self._job, self._world, self._tracker = job, world, tracker
        self._last = max(self.steps(), default=0)
        self._records: Records | None = None

    def steps(self) -> set[int]:
        """Return the steps whose numbers are there already, of an attempt before this one."""
        return {int(record["step"]) for record in records(self._job.run_folder.metrics)}

    def write(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one checkpoint. One of an earlier step is of a run that went back: what came after it goes."""
        if not metrics:
            return
        is_back, self._last = state.step <= self._last, state.step
        if self._records is None:
            self._records = Records(self._job.run_folder, self._world, self._writers)
        elif is_back:
            self._records.reopen()
        record = {"split": "eval", "step": state.step, "epoch": None, "samples": state.samples, "time": time.time(), **metrics}
        self._records.write(record)

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _writers(self) -> list[MetricWriter]:
        config, step = self._job.config, self._last
        if not self._world.is_main:
            return []
        return build_writers(
            config.metrics,
            run_dir=str(self._job.run_folder.root),
            config=config.tree,
            hyper_parameters=self._job.hyper_parameters(),
            run_name="",
            step=step - 1,  # what was written of this step and later ones is of before
            total_steps=max(step, config.trainer.max_steps or 0),
            tracker=self._tracker,
            epoch=None,
            steps_per_epoch=None,
        )
