"""The weights that a run has saved: find the checkpoint, read its weights or their averages, put them into modules.

Used by `load` of the package, evaluations, predictions, exports and `init_from`.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.codec import Leaf
from ddp_train.checkpoint.layout import SHARED
from ddp_train.checkpoint.read import damage_of, read_shared
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces.batch import describe
from ddp_train.interfaces.strategy import is_sharded, local_rows, shard_like
from ddp_train.run_folder.paths import RunFolder

_KEY = "RUN"
_MAX_LINES = 8  # lines about problems in one message
_WEIGHTS = ("model", "objective")
_MODEL = f"{SHARED}.model."  # the prefix of the model's weights
_NO_ADDRESS = -1  # stands for a value that is no tensor, or has no elements on this rank
AVERAGES = "averages"  # the part of a checkpoint with the averaged weights, under the names of the model's weights


def find_run(path: Path) -> tuple[Path, Path]:
    """Return the run folder and the undamaged checkpoint of a path: of a run folder the newest one, else the checkpoint itself.

    Raises UserError: it is neither, or there is no undamaged one.
    """
    path = path.absolute()
    if catalog.is_checkpoint(path):
        return path.parent.parent, catalog.find_checkpoint(path, damage_of, key=_KEY)
    if not RunFolder(path).config.exists():
        expected = "a folder that holds config.yaml, or one of its checkpoints"
        raise ConfigError(key=_KEY, happened=f"{path} is neither a run folder nor a checkpoint", expected=expected)
    newest = RunFolder(path).checkpoints / catalog.LAST
    catalog.require_candidates(newest, key=_KEY)
    return path, catalog.find_checkpoint(newest, damage_of, key=_KEY)


def read_weights(checkpoint: Path, world: World | None = None, modules: Mapping[str, nn.Module] | None = None) -> dict[str, Any]:
    """Return the states of the modules in a checkpoint, the versions of their formats, and the run's position (`state`).

    Where a callback has averaged the weights and the run has evaluated the averages, they are the model's. Collective with a world.

    Args:
        world: its ranks read together; None: this process reads alone.
        modules: those that will get the weights, by name: each rank reads its own rows of a sharded tensor. All others
            come whole, and on the CPU.

    Raises CheckpointError: it is not what its format says.
    """
    likes = dict(sharded_weights(modules or {}))
    likes |= {f"{SHARED}.{AVERAGES}.{name.removeprefix(_MODEL)}": value for name, value in likes.items() if name.startswith(_MODEL)}

    def lay_out(plain: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Tensor]:
        return {name: likes[name] for name, leaf in leaves.items() if name in likes and tuple(likes[name].shape) == leaf.shape}

    only = [*_WEIGHTS, *(f"{name}_versions" for name in _WEIGHTS), AVERAGES, "state"]
    saved = read_shared(checkpoint, world, only=only, lay_out=lay_out)
    model: dict[str, Any] = saved["model"]
    averages = {_address(model[name]): value.to(model[name].dtype) for name, value in saved.pop(AVERAGES, {}).items()}
    averages.pop(_NO_ADDRESS, None)
    return {**saved, "model": {name: averages.get(_address(value), value) for name, value in model.items()}}


def sharded_weights(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield those weights of the modules that are sharded among the ranks, by their names in a checkpoint."""
    for part, module in modules.items():
        for name, value in module.state_dict().items():
            if is_sharded(value):
                yield f"{SHARED}.{part}.{name}", value


def _address(value: Any) -> int:
    """Return the address of a tensor's rows on this rank: that of tied tensors is the same."""
    rows = local_rows(value) if isinstance(value, Tensor) else None
    return rows.data_ptr() if rows is not None and rows.numel() else _NO_ADDRESS


def compare_model(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that only the model or only the checkpoint has, or that has another shape or type."""
    state: Mapping[str, Any] = model.state_dict()
    problems = [f"{name} is missing in the checkpoint" for name in state if name not in saved]
    problems += [f"{name} is in the checkpoint, and not in the model" for name in saved if name not in state]
    for name, value in state.items():
        saved_value = saved.get(name)
        if isinstance(value, Tensor) and isinstance(saved_value, Tensor) and describe(value) != describe(saved_value):
            problems.append(f"{name} is {describe(saved_value)} in the checkpoint, and {describe(value)} in the model")
    return problems


def put_weights(checkpoint: Path, weights: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Put what `read_weights` gave into modules: `model`, and `objective` where it has a state. Raises UserError: of another model."""
    problems = [problem for name, module in modules.items() for problem in compare_model(module, weights.get(name, {}))]
    if problems:
        shown = problems if len(problems) <= _MAX_LINES else [*problems[:_MAX_LINES], "..."]
        happened = "\n    ".join([f"{checkpoint} does not fit the model:", *shown])
        fix = "the code of that run; environment.json of the run has its commit and its packages"
        raise UserError(key="model", happened=happened, expected="the model that the run has trained", fix=fix)
    put_states(modules, weights)


def put_states(modules: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> None:
    """Load the modules' saved states, sharded as the modules are; torch finds the versions of their formats in `_metadata`."""
    for part, module in modules.items():
        current = module.state_dict()
        state = OrderedDict((name, shard_like(value, current[name])) for name, value in saved[part].items())
        state._metadata = saved[f"{part}_versions"]  # type: ignore[attr-defined]
        module.load_state_dict(state)
