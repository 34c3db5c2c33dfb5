"""One evaluation on one rank: a checkpoint of a run, or each as it comes, scored or predicted from. Nothing is trained.

It has a folder of its own below the run's: metrics.jsonl, result.json, logs and predictions are there, and nothing of the run is touched.
So it may run beside the training. A stop ends it at once: nothing is lost that cannot be had again.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.manifest import CheckpointError
from ddp_train.checkpoint.read import damage_of
from ddp_train.config.saved import answers_of
from ddp_train.errors import UserError, printable
from ddp_train.interfaces import MetricWriter
from ddp_train.interfaces.run import WriterFacts
from ddp_train.launch.job import Evaluation
from ddp_train.loader.loader import PositionedEvaluationLoader
from ddp_train.rank import summary
from ddp_train.rank.provenance import record_environment
from ddp_train.rank.train_job import RankRun
from ddp_train.run_folder.paths import COMPLETE, RunFolder, step_of
from ddp_train.run_folder.progress import batch_notes, progress_of
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.starts import AttemptCount
from ddp_train.run_folder.verdict import Outcome, verdict_of
from ddp_train.system.files import json_lines
from ddp_train.system.phase import Phase
from ddp_train.training.build.build import build_evaluation
from ddp_train.training.build.make import make_writers
from ddp_train.training.inference.predict import predict
from ddp_train.training.loop.evaluation import evaluate
from ddp_train.training.parts.components import EvaluationComponents
from ddp_train.training.record.records import Records
from ddp_train.training.state.data_identity import known_meaning
from ddp_train.training.state.weights import put_weights, read_weights

_POLL_S = 2.0
_PRINT_EVERY_S = 300.0


def evaluate_job(run: RankRun, evaluation: Evaluation) -> Status:
    """Evaluate a run that has saved, or predict with it, and return `completed`; result.json has what came of it. Collective.

    The state gets the step of the checkpoint at hand, so that a failure can be told with it.
    """
    job, world, state = run.job, run.world, run.state
    record_environment(job, world)
    if world.is_main:
        print(summary.opening(job, world), flush=True)
    answers = world.from_main(lambda: answers_of(Path(evaluation.run)))
    meaning = world.from_main(lambda: known_meaning(Path(evaluation.run if evaluation.watches else evaluation.checkpoint)))
    components = build_evaluation(job.config, world, answers, meaning)
    seen = {int(record["step"]) for record in json_lines(job.run_folder.metrics)}  # by an attempt before this one
    last, metrics = max(seen, default=0), dict[str, float]()
    records: Records | None = None
    for checkpoint in _checkpoints(run, evaluation, seen):
        state.step = step_of(checkpoint)
        run.phases.enter(Phase.START, state.step)
        if damage := _load(run, checkpoint, components, is_verified=not evaluation.watches):
            if not evaluation.watches:
                raise UserError(key="RUN", happened=f"{checkpoint}: {damage}", expected="a checkpoint that is complete and undamaged")
            world.print(f"checkpoint {checkpoint.name} is left out: {damage}")
            continue
        world.print(f"weights  of {checkpoint}")
        metrics = _infer(run, components, predicts=evaluation.predicts)
        if not metrics:
            continue
        is_back, last = state.step <= last, state.step
        if records is None:
            records = Records(job.run_folder, world, partial(_writers, run) if world.is_main else list)
        elif is_back:  # the run went back: what came after this step goes
            records.reopen()
        records.write({"split": "eval", "step": state.step, "epoch": None, "samples": state.position, "time": time.time(), **metrics})
    run.phases.enter(Phase.END, state.step)
    world.barrier()
    if world.is_main:
        if records is not None:
            records.close()
        values = {"last": {f"eval/{name}": value for name, value in metrics.items()}, "best": {}}
        seconds = round(time.monotonic() - run.started_monotonic, 3)
        result = Result(status=Status.COMPLETED, step=state.step, samples=state.position, metrics=values, seconds=seconds)
        result.write(job.run_folder.result)
        AttemptCount(job.run_folder).finish()
        lines = [f"  {name:<20} {value:.4f}" for name, value in metrics.items()]
        print("", *lines, f"  {'evaluation':<20} {job.run_folder.as_typed()}", sep="\n", flush=True)
    world.barrier()  # no rank leaves before it is written
    return Status.COMPLETED


def _infer(run: RankRun, components: EvaluationComponents, *, predicts: bool) -> dict[str, float]:
    """Score or predict with the weights that are loaded, and return the metrics. Collective."""
    job, world, state = run.job, run.world, run.state
    folder_of = partial(job.run_folder.predictions_of, state.step)
    loaders = components.eval_loaders.values()
    counts = [len(loader) for loader in loaders if isinstance(loader, PositionedEvaluationLoader)]
    num_batches = sum(counts) if len(counts) == len(loaders) else None
    note_batch = batch_notes(job.run_folder, step=state.step, num_batches=num_batches) if world.is_main else lambda: None

    def begins_batch() -> None:
        run.phases.enter(Phase.EVALUATION, state.step)
        note_batch()

    if predicts:
        count = predict(components, world, folder_of(), begins_batch=begins_batch)
        if world.is_main:
            files = f"{RunFolder(folder_of()).as_typed()}/*.npy"
            print(f"predicted {count:,} samples: {files}, one row for each in the data set's order", flush=True)
        return {}
    predictions = folder_of if job.config.evaluation.save_predictions else None
    metrics = evaluate(components, world, predictions=predictions, begins_batch=begins_batch)
    assert metrics is not None  # a stop ends the process
    return metrics


def _load(run: RankRun, checkpoint: Path, components: EvaluationComponents, *, is_verified: bool) -> str | None:
    """Put the weights of a checkpoint into the model on all ranks; return what is wrong with it, or None. Collective.

    Rank 0 alone reads the weights, and gives them to the others: a checkpoint that its run removes meanwhile is missed by all ranks alike.
    Of a model that is sharded among the ranks each reads its own rows, and a checkpoint that is removed meanwhile ends the evaluation.
    """
    world, modules = run.world, components.modules
    if not is_verified and (damage := damage_of(checkpoint, world, on_progress=run.phases.report_progress)):
        return damage

    def put(weights: Mapping[str, Any]) -> None:
        put_weights(checkpoint, weights, modules)
        run.state.position = int(weights["state"]["position"])

    def put_whole() -> str | None:
        try:
            put(read_weights(checkpoint))
        except CheckpointError as error:
            return error.happened
        except OSError as error:
            return f"{error.filename or checkpoint.name}: {error.strerror}"
        return None

    if components.forward_is_collective:
        put(read_weights(checkpoint, world, modules))
        return None
    if damage := world.from_main(put_whole):
        return damage
    states: list[dict[str, Any]] = [module.state_dict() for module in modules.values()]
    others = world.from_main(lambda: [{name: value for name, value in own.items() if not isinstance(value, Tensor)} for own in states])
    for module, own, of_main in zip(modules.values(), states, others, strict=True):
        world.copy_from_main([value for value in own.values() if isinstance(value, Tensor)])
        if of_main and not world.is_main:
            module.load_state_dict({**own, **of_main})
    return None


def _checkpoints(run: RankRun, evaluation: Evaluation, seen: Collection[int]) -> Iterator[Path]:
    """Yield the checkpoint that was asked for, or each one of the run, the oldest first, until no more will come. Collective."""
    if not evaluation.watches:
        find_damage = partial(damage_of, on_progress=run.phases.report_progress)
        yield run.world.from_main(lambda: catalog.find_checkpoint(Path(evaluation.checkpoint), find_damage, key="RUN"))
        return
    watch = new_checkpoints(RunFolder(Path(evaluation.run)), seen=seen)
    while True:
        run.phases.report_progress()
        checkpoint = run.world.from_main(lambda: next(watch, ""))
        if isinstance(checkpoint, str):  # no more will come
            return
        if checkpoint is not None:
            yield checkpoint
        else:
            time.sleep(_POLL_S)


def new_checkpoints(run_folder: RunFolder, *, seen: Collection[int] = ()) -> Iterator[Path | None]:
    """Yield each checkpoint of a run once, the oldest first, and None where there is no new one, until no more will come (rank 0).

    One that its run has saved again, after it went back, comes once more. Those of the steps `seen` are evaluated already, as they are now.
    """
    marks = {entry.step: _mark(entry.path) for entry in catalog.saved_checkpoints(run_folder.checkpoints) if entry.step in seen}
    printed_at = time.monotonic()
    while True:
        verdict = verdict_of(run_folder)  # asked first: what is saved then is all that there will be
        saved = [(entry, _mark(entry.path)) for entry in catalog.saved_checkpoints(run_folder.checkpoints)]
        new = [(entry, mark) for entry, mark in saved if mark and marks.get(entry.step) != mark]
        if new:
            entry, mark = new[0]
            marks[entry.step] = mark
            yield entry.path
            continue
        if verdict.outcome is not Outcome.AGAIN:
            return
        if time.monotonic() > printed_at + _PRINT_EVERY_S:
            print(printable(f"waiting for {run_folder.as_typed()}: {progress_of(run_folder, verdict)}"), flush=True)
            printed_at = time.monotonic()
        yield None


def _mark(checkpoint: Path) -> str:
    """Return the identity of a checkpoint among those of the same step; "" where it has just been removed."""
    with suppress(OSError):
        return (checkpoint / COMPLETE).read_text()
    return ""


def _writers(run: RankRun) -> list[MetricWriter]:
    """Return the run's kinds of metric writers, in the evaluation's own folder (rank 0)."""
    job, state = run.job, run.state
    facts = WriterFacts(
        run_dir=str(job.run_folder.root),
        config=job.config.tree,
        hyper_parameters=job.hyper_parameters(),
        step=state.step - 1,  # what was written of this step and later ones is of before
        total_steps=max(state.step, job.config.trainer.max_steps or 0),
        phases=run.phases,
    )
    return make_writers(job.config.metrics, facts)
