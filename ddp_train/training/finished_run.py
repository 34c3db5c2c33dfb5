"""A run from its folder: `load(RUN)` of the package gives its model with the weights in it, its config, its data and its metrics.

Evaluation, predictions and exports stand on the same: `find` says which checkpoint is meant, `read_weights` what of it counts, and
`put_weights` puts it into modules. The config of a run names the code that is run: it is taken from nobody but its user.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.read import read_shared
from ddp_train.checkpoint.verify import verify
from ddp_train.config.batch_sizes import BatchSizes
from ddp_train.config.run_config import RunConfig
from ddp_train.config.saved import answered_config
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.trust import require_own
from ddp_train.training.build import build_model, make_data
from ddp_train.training.compare_state import compare_model
from ddp_train.training.instantiate import refuse_tools
from ddp_train.training.seeding import random_state, set_random_state

_KEY = "RUN"
_WEIGHTS = ("model", "objective")
AVERAGES = "averages"
"""The part of a checkpoint that has the averaged weights, by the model's names for them."""


@dataclass(kw_only=True)
class FinishedRun:
    """A run that has saved a checkpoint, whether it goes on or not."""

    folder: Path
    checkpoint: Path  # whose weights the model has
    step: int  # after which it was saved
    config: dict[str, Any]  # as it was composed, everything resolved, each `auto` with what it came to
    model: nn.Module  # in the mode of evaluation
    typed: RunConfig  # the same, by its types

    @cached_property
    def data(self) -> Any:
        """The training data: what the config's `_target_` makes, opened when it is asked for."""
        return make_data(self.typed, {}, key="data")

    @cached_property
    def eval_data(self) -> Any:
        """The evaluation data, likewise; None where the run has none."""
        changes = self.typed.data["eval"]
        return make_data(self.typed, changes, key="data.eval") if changes is not None else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl as they are now, one dict a row: `pandas.DataFrame(run.metrics)` is a table."""
        return records(RunFolder(self.folder).metrics)


def load(run: str | Path, *, device: str | torch.device = "cpu") -> FinishedRun:
    """Load a run: its model with weights, its config, its data and its metrics. Starts no process and writes nothing.

    Args:
        run: a run folder, whose newest checkpoint counts; or one of its checkpoints, RUN/checkpoints/best and last too.
        device: where the model goes.

    Raises:
        UserError: there is no checkpoint, or it does not fit the model that the config makes.
    """
    folder, checkpoint = find(Path(run))
    require_own(folder, key=_KEY)
    config = answered_config(folder)
    typed = typed_config(config)
    refuse_tools(typed)
    streams = random_state(torch.device("cpu"))  # a notebook's own random numbers go on as if nothing had been made
    model = build_model(typed, alone(), {})
    set_random_state(streams, torch.device("cpu"))
    put_weights(checkpoint, read_weights(checkpoint), {"model": model})
    step = int(checkpoint.name.removeprefix("step_"))
    return FinishedRun(folder=folder, checkpoint=checkpoint, step=step, config=config, model=model.to(device).eval(), typed=typed)


def find(path: Path) -> tuple[Path, Path]:
    """Return the run folder and the undamaged checkpoint that a path means: the newest one of a run folder, or the one that it names.

    Raises:
        UserError: it is neither, or there is no undamaged one.
    """
    path = path.absolute()
    is_run = (path / "config.yaml").exists() and not catalog.is_checkpoint(path)
    folder = path if is_run else path.parent.parent
    if not is_run and not catalog.is_checkpoint(path):
        raise ConfigError(
            key=_KEY,
            happened=f"{path} is no run folder and no checkpoint",
            expected="a folder that holds config.yaml, or one of its checkpoints",
        )
    name = path / "checkpoints" / catalog.LAST if is_run else path
    if is_run:
        catalog.require_candidates(name, key=_KEY)
    return folder, catalog.find(name, verify, key=_KEY)


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the states of the modules in a checkpoint, the versions of their formats, and the run's position (`state`); all on the CPU.

    Where a callback has averaged the weights and the run has evaluated the averages, they are the model's.

    Raises:
        CheckpointError: it is not what its format says.
    """
    found = read_shared(checkpoint, only=[*_WEIGHTS, *(f"{name}_versions" for name in _WEIGHTS), AVERAGES, "state"])
    own: dict[str, Any] = found["model"]
    averages = {own[name].data_ptr(): value.to(own[name].dtype) for name, value in found.pop(AVERAGES, {}).items()}
    return {**found, "model": {name: averages.get(_place(value), value) for name, value in own.items()}}


def _place(value: Any) -> int:
    """Return where a tensor lies, by which tied ones are known; -1 for what is none, or has no elements."""
    return value.data_ptr() if isinstance(value, Tensor) and value.numel() else -1


def put_weights(checkpoint: Path, weights: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Put what `read_weights` gave into modules, by their names: `model`, and `objective` where it has a state.

    Raises:
        UserError: they are of another model.
    """
    problems = [problem for name, module in modules.items() for problem in compare_model(module, weights.get(name, {}))]
    if problems:
        raise UserError(
            key="model",
            happened="\n    ".join([f"{checkpoint} does not fit the model:", *problems[:_SHOWN], *["..."] * (len(problems) > _SHOWN)]),
            expected="the model that the run has trained",
            fix="the code of that time; environment.json of the run has its commit and its packages",
        )
    for name, module in modules.items():
        tensors = OrderedDict(weights[name])
        tensors._metadata = weights[f"{name}_versions"]  # type: ignore[attr-defined]  # where torch looks for them
        module.load_state_dict(tensors)


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl; [] where there is none. The last line may be on its way."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


_SHOWN = 8


def typed_config(config: dict[str, Any]) -> RunConfig:
    """Return the typed form of a config that was checked when its run began."""
    batch = BatchSizes(
        global_batch_size=config["trainer"]["global_batch_size"],
        micro_batch_size=config["loader"]["micro_batch_size"],
        grad_accum_steps=config["trainer"]["grad_accum_steps"],
        world_size=1,
    )
    return RunConfig.of(config, batch)
