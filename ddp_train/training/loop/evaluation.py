"""Evaluation: every sample exactly once, whatever the number of ranks, and the same metrics on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train import model_log
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import Place, cut, describe, is_cut, own_rows, plain_name
from ddp_train.loader.device_copy import batch_on, copied_ahead
from ddp_train.loader.loader import EvalLoader, Evaluation
from ddp_train.loader.reader import MicroBatch
from ddp_train.training.parts import metric
from ddp_train.training.parts.components import Components, Evaluated
from ddp_train.training.record.predictions import PredictionFiles
from ddp_train.traits import has_modes


def evaluate(
    components: Evaluated,
    world: World,
    *,
    predictions: Callable[[str], Path] | None = None,
    begins_batch: Callable[[], None] = lambda: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Evaluate the bare model on all evaluation sets and return the metrics, the same on every rank. Collective.

    Those of a set with a name are called NAME/loss, and its predictions are in a folder of its name.

    There is no collective inside the loop, so unequal shares cannot hang (a forward through DDP would wait for the others); where every
    forward is one, ranks that are through take part until all are (`in_step`). Counts are added as integers and sums in float64, and
    metrics of `evaluation.metrics` are put together on rank 0 after it. Before it, all ranks take rank 0's buffers: each has updated its
    own BatchNorm averages since the last synchronised forward.

    Args:
        components: with an evaluation set at least.
        predictions: the folder for the per-sample outputs of the objective by the set's name; it `SupportsPredict` then. None: none.
        begins_batch: called before each batch is asked for.
        is_stopping: gives up when it turns true on any rank; the result is None then, on every rank.

    Raises OSError: on every rank when one could not write its predictions.
    """
    metrics: dict[str, float] = {}
    with as_evaluated(components):
        for name, loader in components.eval_loaders.items():
            folder = predictions(name) if predictions else None
            found = _measure(components, loader, world, _Pace(begins_batch, is_stopping), predictions=folder)
            if found is None:
                return None
            metrics |= {metric.of_set(name, each): value for each, value in found.items()}
    return metrics


@contextmanager
def as_evaluated(components: Evaluated) -> Iterator[None]:
    """Let the model be as it is evaluated: its mode, no gradients, the weights that a callback brings. It may be entered twice."""
    parts = [part for part in (components.model, components.objective) if isinstance(part, nn.Module)]
    with torch.no_grad(), model_log.taken_by(None), _averaged(components), _evaluating(parts):
        yield
        components.rest()


@contextmanager
def weights_to_evaluate(components: Components) -> Iterator[SetAside]:
    """Let the weights be those to evaluate and to save, the same on all ranks, and then those that are trained again. Collective.

    They are others where the optimizer keeps such (`evaluation_mode`), and where ranks take steps of their own.
    """
    with (
        evaluation_mode(components.optimizer) as trained,
        components.strategy.joined(components.trained, averages(components).values()) as kept,
    ):
        yield SetAside(trained=trained, kept=kept)


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """What this rank goes on with, where the model holds something else to be evaluated or saved."""

    trained: Sequence[Tensor] = ()  # what `evaluation_mode` yields: the parameters to go on with
    kept: Mapping[Place, Tensor] = field(default_factory=dict)  # its own values of what is the same on all ranks meanwhile


@contextmanager
def evaluation_mode(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Let the parameters be those to evaluate and to save; afterwards they are those that are trained again, to the bit.

    They are others with schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), which say so by two methods, `train()` and
    `eval()`, that change the parameters in place. The way there and back rounds: a run that was saved once more would differ in the last
    bits. So the trained weights are kept meanwhile, and a checkpoint holds both.

    Yields:
        The trained ones, in the order of the optimizer's groups; none where both are the same. An error inside ends the run.
    """
    if not has_modes(optimizer):
        yield []
        return
    kept = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    cast(Any, optimizer).eval()
    yield kept
    training_mode(optimizer, kept)


def training_mode(optimizer: Optimizer, trained: Sequence[Tensor] = ()) -> None:
    """Let the parameters be those that are trained: with the values that `evaluation_mode` yields, or as the optimizer finds them."""
    if has_modes(optimizer):
        cast(Any, optimizer).train()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=bool(trained)):
                parameter.copy_(value)


class _Pace(NamedTuple):
    """Whom the loop over an evaluation set calls."""

    begins_batch: Callable[[], None]
    is_stopping: Callable[[], bool]


def _measure(components: Evaluated, loader: Evaluation, world: World, pace: _Pace, *, predictions: Path | None) -> dict[str, float] | None:
    begins_batch, is_stopping = pace
    model, objective = components.model, components.objective
    parts = [part for part in (model, objective) if isinstance(part, nn.Module)]
    world.copy_from_main([buffer for part in parts for buffer in part.buffers()])
    files = None
    if predictions is not None:
        assert isinstance(loader, EvalLoader)  # build has seen to it: a stream has no order to write them in
        files = PredictionFiles(predictions, world, num_samples=loader.num_samples, first=loader.first)
    for each in components.metrics.values():
        each.reset()
    totals: dict[str, Tensor] = {}
    gave_up, skipped = False, 0
    with _evaluating(parts):
        begins_batch()
        batches = copied_ahead(iter(loader), world.device)
        if components.computes_together:
            batches, is_stopping = in_step(batches, world), agreed(is_stopping, world)
        for micro_batch in batches:
            batch = batch_on(world.device, micro_batch)
            with components.amp.autocast(world.device):
                scores, rows, pair = components.examine(batch, predicts=files is not None)
            if files is not None:
                skips = [bad.sample for bad in micro_batch.skipped]
                files.add(rows if micro_batch.counts else {name: row[:0] for name, row in rows.items()}, skips=skips)
            if pair is not None and micro_batch.counts:
                metric.update(components.metrics, pair)
            skipped += len(micro_batch.skipped)
            for name, value in scores.items():
                value = value.to(torch.float64 if value.is_floating_point() else torch.int64)
                totals[name] = totals.get(name, torch.zeros_like(value)) + (value if micro_batch.counts else 0)
            gave_up = is_stopping()
            if gave_up:
                break  # not before the first batch: all ranks must have the same sums to reduce
            begins_batch()
    totals["gave_up"] = torch.tensor(gave_up, dtype=torch.int64, device=world.device)
    totals["skipped_samples"] = torch.tensor(skipped, device=world.device)
    sums = _sums(totals, world)
    skipped, gave_up = int(sums.pop("skipped_samples")), sums.pop("gave_up") > 0
    if files is not None:
        files.close(keep=not gave_up)
    if gave_up:
        return None
    found = objective.metrics(sums) | metric.results(components.metrics, world)
    return found | ({"skipped_samples": skipped} if loader.skips else {})


def averages(components: Evaluated) -> Mapping[str, Tensor]:
    """Return the weights that a callback brings for evaluation, by the model's names, each of its shape; {} where none does."""
    name = components.averaging
    if name is None:
        return {}
    try:
        weights = components.callbacks[name].evaluation_weights() or {}
    except Exception as error:
        raise named(error, name, "evaluation_weights")  # noqa: B904  # the same error
    own = _tensors(components.model)
    for each, weight in weights.items():
        if each not in own or not isinstance(weight, Tensor) or weight.shape != own[each].shape:
            happened = f"its evaluation_weights() gives {each}: {describe(weight)}, which is {describe(own.get(each))} in the model"
            expected = "tensors with the names and shapes of the model's parameters and buffers (of a compiled one without `_orig_mod.`)"
            raise ConfigError(key=f"callbacks.{name}", happened=happened, expected=expected)
    return weights


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): tensor for name, tensor in chain(model.named_parameters(), model.named_buffers())}


@contextmanager
def _averaged(components: Evaluated) -> Iterator[None]:
    """Let the model have the weights that a callback brings for evaluation, if any, and then its own again. An error ends the run.

    Tensors change places and are not copied where the types are the same: so averages of buffers become rank 0's, too. Rows of tensors
    that are cut among the ranks are copied.
    """
    weights = averages(components)
    if not weights:
        yield
        return
    own = _tensors(components.model)
    kept = {name: own[name].data for name in weights if not is_cut(own[name])}
    rows = {name: own_rows(own[name]) for name in weights if is_cut(own[name])}  # a strategy knows the memory that they lie in
    copies = {name: each.clone() for name, each in rows.items()}
    for name in kept:
        own[name].data = weights[name].to(own[name].device, own[name].dtype)
    for name, each in rows.items():
        each.copy_(own_rows(cut(weights[name], own[name])))
    yield
    for name, tensor in kept.items():
        own[name].data = tensor
    for name, copy in copies.items():
        rows[name].copy_(copy)


@contextmanager
def _evaluating(parts: list[nn.Module]) -> Iterator[None]:
    """Set all to evaluation, and each module back to the mode of its own. An error ends the run."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for part in parts:
        part.eval()
    yield
    for module, mode in modes:
        module.training = mode


def _sums(totals: Mapping[str, Tensor], world: World) -> dict[str, Any]:
    """Add up over the ranks: once the floats, once the integers, which stay exact. A row comes as a list. Collective."""
    sums: dict[str, Any] = {}
    for is_float in (True, False):
        part = {name: value for name, value in totals.items() if value.is_floating_point() == is_float}
        if part:
            summed = world.sum(torch.cat([value.reshape(-1) for value in part.values()])).cpu()  # the device is waited for once
            values = summed.split([value.numel() for value in part.values()])
            sums |= {name: value.view(part[name].shape).tolist() for name, value in zip(part, values, strict=True)}
    return sums


def in_step(batches: Iterator[MicroBatch], world: World) -> Iterator[MicroBatch]:
    """Yield this rank's batches, and then its last one again, which does not count, until all ranks are through. Collective for each.

    For an evaluation in which every forward is a collective. Whether a rank has another batch only it knows, of a stream not before it has
    asked; so all ranks tell each other before every batch.
    """
    newest = None
    while _any((batch := next(batches, None)) is not None, world):
        if batch is None:
            assert newest is not None  # each rank has one at least
            batch = newest._replace(counts=False, skipped=())
        newest = batch
        yield batch


def agreed(is_asked: Callable[[], bool], world: World) -> Callable[[], bool]:
    """Return what tells whether any rank was asked to stop; every rank calls it at the same places. Collective."""
    return lambda: _any(is_asked(), world)


def _any(value: bool, world: World) -> bool:
    return bool(world.sum(torch.tensor(int(value))).item())  # on the CPU: it waits for the other ranks, and not for the device


def named(error: Exception, name: str, where: str) -> Exception:
    """Return the error, which says from now on that it is of the callback `name`, in its method `where`."""
    if isinstance(error, UserError):
        error.key = error.key or f"callbacks.{name}"
    else:
        error.add_note(f"config key: callbacks.{name} (in its `{where}`)")
    return error
