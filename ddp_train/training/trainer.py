"""The loop: train, train_step, evaluate.

Ordinary code that is meant to be read and owned. Between two log steps nothing here waits for the device, unless that is some steps behind
(`device_queue.py`), and no collective runs beside DDP's own (one small all-reduce a step, during the first forward, when the objective's
weights depend on the batch's content).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.interfaces import Indices, Objective, Predicting, batch_size
from ddp_train.loader.device_copy import copied_ahead, to_device
from ddp_train.loader.loader import EvalLoader, Evaluation
from ddp_train.loader.order import epochs
from ddp_train.loader.reader import MicroBatch
from ddp_train.phase import Phase, PhaseTracker
from ddp_train.training.components import Components
from ddp_train.training.device_queue import device_queue
from ddp_train.training.log_window import LogWindow
from ddp_train.training.loss_monitor import LossMonitor, Rewind
from ddp_train.training.predictions import PredictionFiles
from ddp_train.training.replica_check import ReplicaCheck
from ddp_train.training.sanity_check import check, explain, untouched
from ddp_train.training.skip_nonfinite import StepGuard
from ddp_train.training.state import TrainState

Record = dict[str, Any]
"""One line of metrics.jsonl."""

_EVERY_STEP = StepGuard()


@dataclass(kw_only=True)
class Loop:
    """What `train` needs beside the components: how often to do what, and whom to tell."""

    log_every_steps: int
    evaluate_every_steps: int | None  # None: at the end of every epoch
    clip_grad_norm: float | None
    write: Callable[[Record], None]  # rank 0 writes, the others drop it
    save: Callable[[LogWindow], None]  # collective
    saves_after: Callable[[int], bool] = lambda step: False  # whether a checkpoint is due, asked after each step; the same on all ranks
    stops_after: Callable[[int], bool] = lambda step: False  # whether this step is the last for now; the same on all ranks
    is_stopping: Callable[[], bool] = lambda: False  # whether a stop was asked for; not at the same time on all ranks
    sanity_check: bool = False  # before the first step: one batch of training and one of evaluation are tried
    tracker: PhaseTracker = field(default_factory=PhaseTracker)
    predictions_of: Callable[[int], Path] | None = None  # where those of the evaluation after a step go; None: they are not saved
    watch: LossMonitor = field(default_factory=LossMonitor)
    guard: StepGuard = field(default_factory=StepGuard)
    replicas: ReplicaCheck = field(default_factory=ReplicaCheck)
    rewind: Callable[[Rewind], None] | None = None  # collective; after it the state is that of a checkpoint, but for the data's position
    last: dict[str, float] = field(default_factory=dict)  # the newest value of every metric, as `split/name`


def train(components: Components, state: TrainState, world: World, loop: Loop) -> bool:
    """Train from `state` to the last step, or until a stop. Collective.

    Returns:
        Whether all is done; False after a stop, with everything saved that continuing needs.

    Raises:
        NonFiniteLossError: the loss was NaN or infinite; all ranks raise at the same log step.
        ReplicaError: the ranks' weights are not the same any more.
    """
    stream = _stream(components, state, world, loop)
    while True:
        try:
            return _train(components, state, world, loop, stream)
        except Rewind as found:  # the data goes on where it is
            if loop.rewind is None:
                raise
            loop.rewind(found)
            loop.replicas.go_back()


def _stream(components: Components, state: TrainState, world: World, loop: Loop) -> Iterator[MicroBatch]:
    """Return this rank's micro-batches, after its first one has served for all that comes before the first step. Collective."""
    stream = copied_ahead(components.train_loader.micro_batches(state.samples), world.device)
    if state.step >= components.total_steps:
        return stream
    is_settled = state.step > 0 or world.size == 1 or not _keeps_gradients(components)
    if is_settled and not loop.sanity_check:
        return stream
    first = list(islice(stream, 1))  # of the loader itself: its workers start once, and nothing is read twice
    if loop.sanity_check:
        check(components, first, world, samples=state.samples, predicts=loop.predictions_of is not None)
    if not is_settled and first:
        with untouched(components, world.device):
            rebuild_buckets(components, world, first[0])
    return _after(first, stream)


def _after(first: list[MicroBatch], rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield all of them, and keep none: `itertools.chain` would hold the first ones, and their memory, to its end."""
    while first:
        yield first.pop(0)
    yield from rest


def _train(components: Components, state: TrainState, world: World, loop: Loop, stream: Iterator[MicroBatch]) -> bool:
    """Train from `state` to the last step, or until a stop or a rewind."""
    loader = components.train_loader
    components.module.train()
    window, queue = LogWindow(world.device, state.window), device_queue(world.device, loop.tracker)
    if state.owes_evaluation or state.step >= components.total_steps:  # or killed between its last step and its result
        if not _evaluate(components, state, world, loop):
            return False  # the checkpoint that we come from owes it, too
        state.owes_evaluation = False
    while state.step < components.total_steps:
        batch = loader.order.batch_at(state.samples)
        is_last = state.step + 1 == components.total_steps
        is_log_step = is_last or (state.step + 1) % loop.log_every_steps == 0
        grad_norm = train_step(
            components,
            _of_step(components, state, world, loop, stream, window),
            world,
            window,
            global_batch_size=batch.size,
            clip_grad_norm=loop.clip_grad_norm,
            measure_grad_norm=is_log_step,
            guard=loop.guard,
            sample_ids=partial(loader.sample_ids, state.samples),
        )
        state.step += 1
        state.samples += batch.size
        queue.after_step(state.step)
        loop.replicas.after(state.step)
        if is_log_step:
            _log(components, state, world, loop, window, grad_norm)
            window = LogWindow(world.device)

        ends_period = state.step % loop.evaluate_every_steps == 0 if loop.evaluate_every_steps else batch.stop == loader.order.epoch_size
        stops = loop.stops_after(state.steps_taken)
        if is_last or ends_period:
            started = time.perf_counter()
            stops = stops or not _evaluate(components, state, world, loop)
            state.owes_evaluation = stops
            window.leave_out(started)
        saves = loop.saves_after(state.step)  # after the evaluation: it may be one of the best
        if is_last or stops or saves:
            started = time.perf_counter()
            loop.tracker.enter(Phase.SAVE, state.step)
            if not is_log_step:  # else it is known: weights that are lost must not replace good ones
                loop.watch.judge(window, window.read(world), state, loader.order, is_scaled=components.scaler.is_enabled())
            loop.replicas.before_save(state.step)
            loop.save(window)
            window.leave_out(started)
        if stops:
            return False
    return True


def _of_step(
    components: Components, state: TrainState, world: World, loop: Loop, stream: Iterator[MicroBatch], window: LogWindow
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the next step, each when it is asked for: few of them are on the device at a time."""
    step, parts = state.step, components.train_loader.grad_accum_steps
    for number in range(parts):
        started = time.perf_counter()
        loop.tracker.enter(Phase.DATA, step)
        micro_batch = next(stream, None)
        if micro_batch is None:  # on one rank, say: the others would wait for it in the all-reduce
            raise DataError(
                key="data",
                happened=f"the data of rank {world.rank} ended within step {step + 1}, after {number} of its {parts} micro-batches",
                expected="data that goes on until the run's last step, on every rank",
                fix="look for a StopIteration that the data set raises",
            )
        window.data_wait_s += time.perf_counter() - started
        window.skipped += len(micro_batch.skipped)
        loop.tracker.enter(Phase.STEP, step)
        yield micro_batch


def train_step(
    components: Components,
    micro_batches: Iterable[MicroBatch],
    world: World,
    window: LogWindow,
    *,
    global_batch_size: int,
    clip_grad_norm: float | None,
    measure_grad_norm: bool = False,
    guard: StepGuard = _EVERY_STEP,
    sample_ids: Callable[[int], Indices | None] = lambda number: None,
) -> Tensor | None:
    """Take one optimizer step over this rank's micro-batches of one global batch. Collective: every rank calls it.

    Gradients are all-reduced once, in the last micro-batch's backward, and are the exact weighted mean over the global batch: every
    loss is a sum, divided by the weight of the whole batch.

    Args:
        micro_batches: as many as the loader's `grad_accum_steps`, asked for one by one.
        sample_ids: gives the samples of each of them, for messages.

    Returns:
        Gradient norm before clipping, L2 over all parameters, shape [], not synchronised; None when it is neither measured nor clipped.

    Source: Li et al. 2020, arXiv:2006.15704 (DDP; skipping synchronisation while accumulating).
    """
    window.begin_step()
    guard.begin()
    last = components.train_loader.grad_accum_steps - 1
    total_weight, micro_batches = _start_total_weight(components.objective, micro_batches, world, global_batch_size=global_batch_size)
    for number, micro_batch in enumerate(micro_batches):
        try:
            with components.strategy.no_sync(components.module) if number < last else nullcontext():
                _accumulate(components, micro_batch, world, window, total_weight, guard)
        except IndexError as error:  # a label out of range, say
            what = "this rank's micro-batch"
            explain(error, components.model, components.objective, micro_batch, sample_ids(number), what=what)
            raise

    grad_norm = None
    if clip_grad_norm is not None or measure_grad_norm or guard.needs_norm:
        # Before the optimizer's step, which may use the gradients' memory.
        components.scaler.unscale_(components.optimizer)
        parameters = [parameter for parameter in components.module.parameters() if parameter.grad is not None]
        grad_norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if clip_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, grad_norm)
    guard.step(components.optimizer, components.scaler, grad_norm)
    components.scaler.update()
    components.scheduler.step()
    _zero_gradients(components)
    if guard.needs_norm and grad_norm is not None:
        window.norms.append(grad_norm)
    window.end_step(total_weight(), samples=global_batch_size)
    return grad_norm


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    loader: Evaluation,
    world: World,
    *,
    autocast: Any,
    is_stopping: Callable[[], bool] = lambda: False,
    begins_batch: Callable[[], None] = lambda: None,
    predictions: Path | None = None,
) -> dict[str, float] | None:
    """Evaluate on every sample exactly once and return the metrics, the same on every rank. Collective.

    There is no collective inside the loop, so unequal shares cannot hang; counts are added as integers and sums in float64. Before it, all
    ranks take rank 0's buffers: each has updated its own BatchNorm averages since the last synchronised forward.

    Args:
        model: the bare model: a forward through DDP would wait for the other ranks.
        autocast: the context to run forward in.
        begins_batch: called before each batch is asked for.
        is_stopping: gives up when it turns true on any rank; the result is None then, on every rank.
        predictions: a folder for the per-sample outputs of the objective, which is `Predicting` then; None: they are not saved.

    Raises:
        OSError: on every rank when one could not write its predictions.
    """
    world.copy_from_main(_buffers(model, objective))
    parts = [part for part in (model, objective) if isinstance(part, nn.Module)]
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for part in parts:
        part.eval()
    totals: dict[str, Tensor] = {}
    gave_up = False
    skipped = 0
    files = None
    if predictions is not None:
        assert isinstance(loader, EvalLoader)  # build has seen to it: a stream has no order to write them in
        files = PredictionFiles(predictions, world, num_samples=loader.num_samples, first=loader.first)
    begins_batch()
    for number, micro_batch in enumerate(copied_ahead(iter(loader), world.device)):
        batch = micro_batch.batch if micro_batch.placed is None else micro_batch.placed
        try:
            with autocast:
                if files is None:
                    scores = objective.score(model, batch)
                else:
                    scores, rows = cast(Predicting, objective).predict(model, batch)
        except IndexError as error:  # a label out of range, say
            explain(error, model, objective, micro_batch, loader.sample_ids(number), what="this rank's evaluation batch")
            raise
        if files is not None:
            skips = [bad.sample for bad in micro_batch.skipped]
            files.add(rows if micro_batch.counts else {name: row[:0] for name, row in rows.items()}, skips=skips)
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
    for module, mode in modes:
        module.training = mode
    sums: dict[str, float] = {}
    for is_float in (True, False):
        names = [name for name, value in totals.items() if value.is_floating_point() == is_float]
        if names:
            sums |= zip(names, world.sum(torch.stack([totals[name] for name in names])).tolist(), strict=True)
    skipped = int(sums.pop("skipped_samples"))
    gave_up = sums.pop("gave_up") > 0
    if files is not None:
        files.close(keep=not gave_up)
    return None if gave_up else objective.metrics(sums) | ({"skipped_samples": skipped} if loader.skips else {})


def rebuild_buckets(components: Components, world: World, micro_batch: MicroBatch | None = None) -> None:
    """Bring DDP into the state that it has after its first steps, before a checkpoint is loaded. Collective.

    DDP rebuilds its buckets after the first backward, and where an element lies in a bucket decides the order in which the ranks' values
    are added. Without this, a resumed run on three or more ranks differs from one that never stopped in the last bits. Parameters are
    not touched; buffers and random streams are, so it comes before loading. Twice, because a static graph takes two.

    Where gradients are kept (`_keeps_gradients`) they are in the buckets from then on, so a run that begins is settled, too.
    """
    if world.size == 1:
        return
    micro_batch = micro_batch or components.train_loader.peek()
    batch = to_device(micro_batch.batch, world.device) if micro_batch.placed is None else micro_batch.placed
    for _ in range(2):
        components.optimizer.zero_grad(set_to_none=True)  # which would keep the first buckets alive beside those that replace them
        with components.amp.autocast(world.device):
            loss = components.loss(batch)
        loss.backward()
    _zero_gradients(components)


def _accumulate(
    components: Components,
    micro_batch: MicroBatch,
    world: World,
    window: LogWindow,
    total_weight: Callable[[], float | Tensor],
    guard: StepGuard,
) -> None:
    """Run one micro-batch forward and backward, adding to the gradients and to the window's loss."""
    batch = to_device(micro_batch.batch, world.device) if micro_batch.placed is None else micro_batch.placed
    with components.amp.autocast(world.device):
        loss_sum = components.loss(batch)
    if not micro_batch.counts:
        loss_sum = loss_sum * 0.0
    weight = total_weight()  # not needed before
    divisor = torch.where(weight == 0, 1.0, weight) if isinstance(weight, Tensor) else weight  # 0: nothing counts
    objective_value = loss_sum * (world.size / divisor)  # DDP takes the mean over the ranks; the sum is wanted
    components.scaler.scale(guard.mark(objective_value, loss_sum)).backward()
    window.loss_sum += loss_sum.detach()


def _start_total_weight(
    objective: Objective, micro_batches: Iterable[MicroBatch], world: World, *, global_batch_size: int
) -> tuple[Callable[[], float | Tensor], Iterable[MicroBatch]]:
    """Return what gives the weight of the whole global batch, and the micro-batches.

    The weight is known from the shapes of the first one; or it is that of all of them, being summed over the ranks meanwhile.
    """
    rest = iter(micro_batches)
    first = next(rest)
    weight = objective.weight(first.batch)
    if isinstance(weight, int):
        known = weight / batch_size(first.batch) * global_batch_size
        return lambda: known, _after([first], rest)
    every = [first, *rest]
    weights = [torch.as_tensor(objective.weight(each.batch), dtype=torch.float64) * each.counts for each in every]
    wait = world.start_sum(torch.stack(weights).sum())  # reduced where the data is, mostly on the CPU: no wait for the device

    return cache(lambda: wait().to(world.device, non_blocking=True)), every


def _zero_gradients(components: Components) -> None:
    """Forget the gradients of a step."""
    components.optimizer.zero_grad(set_to_none=not _keeps_gradients(components))


def _keeps_gradients(components: Components) -> bool:
    """Tell whether gradients are zeroed where they are, in DDP's buckets.

    So with accumulation: the first micro-batches of a step would else put theirs beside the buckets, in as much memory again. Without,
    DDP itself moves each one there, and zeroing is work for nothing. Not where a parameter may have none in a step, as optimizers must see.
    """
    module = components.module
    return (
        components.train_loader.grad_accum_steps > 1
        and isinstance(module, DistributedDataParallel)
        and bool(module.gradient_as_bucket_view)
        and not module.find_unused_parameters
    )


def _log(components: Components, state: TrainState, world: World, loop: Loop, window: LogWindow, grad_norm: Tensor | None) -> None:
    """Reduce once, read the device once, and write one record. Collective."""
    reading = window.read(world, grad_norm)
    assert reading.grad_norm is not None
    loss = loop.watch.judge(window, reading, state, components.train_loader.order, is_scaled=components.scaler.is_enabled())
    elapsed = time.perf_counter() - window.started
    values = {
        "loss": loss,
        "lr": float(components.scheduler.get_last_lr()[0]),
        "grad_norm": reading.grad_norm,
        "samples_per_s": window.samples / elapsed,
        "step_ms": 1e3 * elapsed / window.steps,
        "data_wait_ms": 1e3 * window.data_wait_s / window.steps,
    }
    if components.train_loader.skips:
        values["skipped_samples"] = reading.skipped
    if loop.guard.needs_norm:
        values["skipped_steps"] = window.skipped_steps
    _write(components, state, loop, "train", values)


def _evaluate(components: Components, state: TrainState, world: World, loop: Loop) -> bool:
    """Evaluate and write a record; False: a stop came before it was done, on all ranks alike. Collective."""
    if components.eval_loader is None:
        return True
    metrics = evaluate(
        components.model,
        components.objective,
        components.eval_loader,
        world,
        autocast=components.amp.autocast(world.device),
        is_stopping=loop.is_stopping,
        begins_batch=lambda: loop.tracker.enter(Phase.EVALUATION, state.step),
        predictions=loop.predictions_of(state.step) if loop.predictions_of else None,
    )
    if metrics is None:
        return False
    for name, goal in components.objective.goals.items():
        if name in metrics and math.isfinite(metrics[name]):
            best = state.best.get(f"eval/{name}")
            if best is None or (metrics[name] > best["value"] if goal == "max" else metrics[name] < best["value"]):
                state.best[f"eval/{name}"] = {"value": metrics[name], "step": state.step}
    _write(components, state, loop, "eval", metrics)
    return True


def _write(components: Components, state: TrainState, loop: Loop, split: str, values: Mapping[str, float]) -> None:
    epoch = epochs(components.train_loader.order, state.samples)
    loop.last |= {f"{split}/{name}": value for name, value in values.items()}
    loop.write({"split": split, "step": state.step, "epoch": epoch, "samples": state.samples, "time": time.time(), **values})


def _buffers(model: nn.Module, objective: Objective) -> list[Tensor]:
    """Return the buffers of both."""
    return list(chain(model.buffers(), objective.buffers() if isinstance(objective, nn.Module) else ()))
