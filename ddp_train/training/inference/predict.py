"""A model's predictions for samples without targets: one row for each sample, in the data set's order."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import Objective
from ddp_train.loader.device_copy import batch_on, copied_ahead
from ddp_train.loader.loader import PositionedEvaluationLoader
from ddp_train.training.loop.evaluation import evaluating, in_lockstep
from ddp_train.training.parts.components import EvaluationComponents
from ddp_train.training.record.predictions import PredictionFiles
from ddp_train.traits import name_of


def predict(components: EvaluationComponents, world: World, folder: Path, *, begins_batch: Callable[[], None] = lambda: None) -> int:
    """Write the predictions for all evaluation data, and return the number of samples. Collective.

    The files appear together in the folder; samples.txt has the names of samples where the data has names. `begins_batch` is called before
    each batch is read. Raises ConfigError: the data has no order to write them in. OSError: on every rank when one could not write.
    """
    loader, model = components.eval_loader, components.model
    if not isinstance(loader, PositionedEvaluationLoader):
        expected = "data with positions, in whose order predictions are written"
        raise ConfigError(key="data", happened="is a stream, whose samples have no positions", expected=expected)
    files = PredictionFiles(folder, world, num_samples=loader.num_samples, first=loader.first)
    if world.is_main and loader.source.where(0):
        files.name_samples(loader.source.where(index) for index in range(loader.num_samples))
    with evaluating(components):
        begins_batch()
        batches = copied_ahead(iter(loader), world.device)
        for micro_batch in in_lockstep(batches, world) if components.forward_is_collective else batches:
            with batch_on(world.device, micro_batch) as batch, components.amp.autocast(world.device):
                rows = infer(components.objective, model, components.objective.inputs(batch))
            skips = [bad.sample for bad in micro_batch.bad_samples]
            files.add({name: row[:0] for name, row in rows.items()} if micro_batch.is_stand_in else rows, skips=skips)
            begins_batch()
    files.close(keep=True)
    return loader.num_samples


def infer(objective: Objective, model: nn.Module, inputs: Any) -> Mapping[str, Tensor]:
    """Return one row per sample by name; a ConfigError: the objective gives none."""
    rows = objective.infer(model, inputs)
    if not rows:
        happened = f"{name_of(objective)}.infer gives nothing for samples without targets"
        raise ConfigError(key="objective", happened=happened, expected="tensors with one row for each sample")
    return rows
