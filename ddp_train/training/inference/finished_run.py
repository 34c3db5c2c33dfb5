"""A run from its folder: `load(RUN)` of the package gives its model with the weights in it, its config, its data and its metrics.

The config of a run names code that is run: the folder must be this user's, or the user must trust it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_train.config.batch_sizes import BatchSizes
from ddp_train.config.run_config import RunConfig, evaluation_sets, set_name
from ddp_train.config.saved import answered_config
from ddp_train.distributed.world import alone
from ddp_train.run_folder.paths import RunFolder, step_of
from ddp_train.run_folder.trust import require_trust
from ddp_train.system.files import json_lines
from ddp_train.training.build.data import adapt, make_data
from ddp_train.training.build.model import build_model
from ddp_train.training.seeding import random_state, set_random_state
from ddp_train.training.state.data_identity import require_same_meaning, saved_identity
from ddp_train.training.state.weights import find_run, put_weights, read_weights


@dataclass(kw_only=True)
class FinishedRun:
    """A run that has saved a checkpoint; it may still be training."""

    folder: Path
    checkpoint: Path  # the model has its weights
    step: int  # of the checkpoint
    config: dict[str, Any]  # as composed, everything resolved, each `auto` replaced by its value
    model: nn.Module  # in evaluation mode
    typed: RunConfig  # `config`, typed
    meaning: Mapping[str, Any]  # of the numbers in its data, to the model (`DataSource.meaning`)

    @cached_property
    def data(self) -> Any:
        """The training data: the object of the config's `_target_`, opened on first use."""
        return self._make_data("data")

    @cached_property
    def eval_data(self) -> Any:
        """The evaluation data, likewise; None where the run has none."""
        return self._make_data("data.eval") if "data.eval" in evaluation_sets(self.typed.tree) else None

    @cached_property
    def eval_sets(self) -> dict[str, Any]:
        """The data of `evaluation.sets` by its names, likewise."""
        return {name: self._make_data(key) for key in evaluation_sets(self.typed.tree) if (name := set_name(key))}

    def _make_data(self, key: str) -> Any:
        data = make_data(self.typed, key=key)
        source = adapt(data)
        source.use_meaning(self.meaning)
        require_same_meaning(source.meaning, self.meaning, key=key, accepted=self.typed.accept_changed_data)
        return data

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl as they are now, one dict a row: `pandas.DataFrame(run.metrics)` is a table."""
        return [*json_lines(RunFolder(self.folder).metrics)]


def load(run: str | Path, *, device: str | torch.device = "cpu", trust: bool = False) -> FinishedRun:
    """Load a run: its model with weights, its config, its data and its metrics. Starts no process and writes nothing.

    Args:
        run: a run folder, for its newest checkpoint; or one of its checkpoints, RUN/checkpoints/best and last too.
        device: where the model goes.
        trust: accept a folder that another user could have written: code that its config names runs as you.

    Raises UserError: another user could have written the folder; there is no checkpoint, or it does not fit the model of the config.
    """
    folder, checkpoint = find_run(Path(run))
    require_trust(folder, key="RUN", is_trusted=trust, accept="load(RUN, trust=True)")
    config = answered_config(folder)
    typed = typed_config(config)
    streams = random_state(torch.device("cpu"))  # a notebook's random streams go on as if no model had been built
    model = build_model(typed, alone(), {})
    set_random_state(streams, torch.device("cpu"))
    put_weights(checkpoint, read_weights(checkpoint), {"model": model})
    step, meaning = step_of(checkpoint), saved_identity(checkpoint).get("meaning", {})
    model = model.to(device).eval()
    return FinishedRun(folder=folder, checkpoint=checkpoint, step=step, config=config, model=model, typed=typed, meaning=meaning)


def typed_config(config: dict[str, Any]) -> RunConfig:
    """Return the typed form of a config that was checked when its run began."""
    total, micro = config["trainer"]["global_batch_size"], config["loader"]["micro_batch_size"]
    accumulation = config["trainer"]["grad_accum_steps"]
    batch = BatchSizes(global_batch_size=total, micro_batch_size=micro, grad_accum_steps=accumulation or -(-total // micro), world_size=1)
    return RunConfig.of(config, batch)
