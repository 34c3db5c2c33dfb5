"""The weights that a run has saved: which checkpoint is meant, what of it counts, and how it comes into modules.

`load` of the package, evaluations, predictions, exports and `init_from` stand on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.read import read_shared
from ddp_train.checkpoint.verify import verify
from ddp_train.errors import ConfigError, UserError
from ddp_train.training.compare_state import compare_model

_KEY = "RUN"
_SHOWN = 8
_WEIGHTS = ("model", "objective")
AVERAGES = "averages"
"""The part of a checkpoint that has the averaged weights, by the model's names for them."""


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
