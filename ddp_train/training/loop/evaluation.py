"""Evaluation: every sample exactly once, whatever the number of ranks, and the same metrics on all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ddp_train import model_log
from ddp_train.distributed.world import World
from ddp_train.errors import conflict
from ddp_train.interfaces import draw
from ddp_train.interfaces.batch import batch_size
from ddp_train.interfaces.objective import module_of
from ddp_train.loader.device_copy import batch_on, copied_ahead
from ddp_train.loader.loader import EvaluationLoader, PositionedEvaluationLoader
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.parts import metric
from ddp_train.training.parts.components import EvaluationComponents
from ddp_train.training.parts.evaluated_weights import averaged_weights
from ddp_train.training.record.predictions import PredictionFiles
from ddp_train.traits import name_of


def evaluate(
    components: EvaluationComponents,
    world: World,
    *,
    predictions: Callable[[str], Path] | None = None,
    begins_batch: Callable[[], None] = lambda: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Evaluate the bare model on all evaluation sets and return the metrics, the same on every rank. Collective.

    The metrics of a set with a name are called NAME/loss, and its predictions are in a folder of its name.

    There is no collective inside the loop, so unequal parts cannot hang (a forward through DDP would wait for the others); where every
    forward is one, ranks that are done take part until all are (`in_lockstep`). Counts are added as integers and sums in float64; metrics
    of `evaluation.metrics` are merged on rank 0 after the loop. Before it, all ranks copy rank 0's buffers: each has updated its own
    BatchNorm averages since the last synchronised forward.

    Args:
        components: have at least one evaluation set.
        predictions: returns the folder for the per-sample outputs of a set, by its name. None: they are not saved.
        begins_batch: called before each batch is read.
        is_stopping: the evaluation ends when it returns True on any rank; then the result is None on every rank.

    Raises OSError: on every rank when one could not write its predictions.
    """
    metrics: dict[str, float] = {}
    with evaluating(components):
        for name, loader in components.eval_loaders.items():
            folder = predictions(name) if predictions else None
            set_metrics = _evaluate_set(components, loader, world, predictions=folder, begins_batch=begins_batch, is_stopping=is_stopping)
            if set_metrics is None:
                return None
            metrics |= {metric.recorded_name(name, metric_name): value for metric_name, value in set_metrics.items()}
    return metrics


@contextmanager
def evaluating(components: EvaluationComponents) -> Iterator[None]:
    """Set the model to evaluation: its mode, no gradients, a callback's averaged weights. It may be entered twice."""
    modules = _modules_of(components)
    with torch.no_grad(), model_log.taken_by(None), averaged_weights(components), _in_eval_mode(modules):
        yield
        components.reshard()


def _evaluate_set(
    components: EvaluationComponents,
    loader: EvaluationLoader,
    world: World,
    *,
    predictions: Path | None,
    begins_batch: Callable[[], None],
    is_stopping: Callable[[], bool],
) -> dict[str, float] | None:
    objective = components.objective
    world.copy_from_main([buffer for part in _modules_of(components) for buffer in part.buffers()])
    files = None
    if predictions is not None:
        assert isinstance(loader, PositionedEvaluationLoader)  # build refuses a stream, which has no order to write them in
        files = PredictionFiles(predictions, world, num_samples=loader.num_samples, first=loader.first)
    for metric_object in components.evaluation_metrics.values():
        metric_object.reset()
    totals = metric.ValueTotals()
    place = loader.first if isinstance(loader, PositionedEvaluationLoader) else None
    gives_up = False
    num_skipped = 0
    begins_batch()
    batches = copied_ahead(iter(loader), world.device)
    if components.forward_is_collective:
        batches = in_lockstep(batches, world)
        is_stopping = on_any_rank(is_stopping, world)
    for micro_batch in batches:
        with (
            batch_on(world.device, micro_batch) as batch,
            draw.Source(components.seed, place, batch, world.device),
            components.amp.autocast(world.device),
        ):
            measured = components.evaluate_batch(batch)
            size = batch_size(batch)
        totals.add(measured.values, size=size, counts=not micro_batch.is_stand_in)
        if place is not None:
            place += size + len(micro_batch.bad_samples)
        if files is not None:
            if not measured.rows:
                happened = f"is true, and {name_of(objective)}.evaluate gives nothing for each sample"
                raise conflict("evaluation.save_predictions", happened, "false", expected="values of shape [B], or rows")
            rows = {name: values[:0] for name, values in measured.rows.items()} if micro_batch.is_stand_in else measured.rows
            files.add(rows, skips=[bad.sample for bad in micro_batch.bad_samples])
        if not micro_batch.is_stand_in:
            metric.update(components.evaluation_metrics, measured.compared)
        num_skipped += len(micro_batch.bad_samples)
        if gives_up := is_stopping():
            break  # only after the first batch: all ranks need the same names for the reduction
        begins_batch()
    num_giving_up, num_skipped = world.sum(torch.tensor([gives_up, num_skipped])).tolist()
    means = totals.means(world.sum)
    if files is not None:
        files.close(keep=not num_giving_up)
    if num_giving_up:
        return None
    metrics = {**objective.metrics(means), **metric.results(components.evaluation_metrics, world)}
    return metrics | ({"skipped_samples": num_skipped} if loader.skips_bad_samples else {})


def _modules_of(components: EvaluationComponents) -> list[nn.Module]:
    return [part for part in (components.model, module_of(components.objective)) if part is not None]


@contextmanager
def _in_eval_mode(roots: list[nn.Module]) -> Iterator[None]:
    """Set all modules to evaluation, and afterwards each one back to its own mode. An error ends the run."""
    modes = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    yield
    for module, mode in modes:
        module.training = mode


def in_lockstep(batches: Iterator[MicroBatch], world: World) -> Iterator[MicroBatch]:
    """Yield this rank's batches, and then its last one again, which does not count, until all ranks are done. Collective for each.

    For an evaluation in which every forward is a collective. Only a rank itself knows whether it has another batch, and with a stream only
    after the attempt to read it; so all ranks agree before every batch.
    """
    newest = None
    while _is_any((batch := next(batches, None)) is not None, world):
        if batch is None:
            assert newest is not None  # each rank has at least one
            batch = newest._replace(is_stand_in=True, bad_samples=())
        newest = batch
        yield batch


def on_any_rank(is_true: Callable[[], bool], world: World) -> Callable[[], bool]:
    """Return a collective that tells whether `is_true` returns True on any rank."""
    return lambda: _is_any(is_true(), world)


def _is_any(value: bool, world: World) -> bool:
    return bool(world.sum(torch.tensor(int(value))).item())  # on the CPU: it waits for the other ranks, and not for the device
