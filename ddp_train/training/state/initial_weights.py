"""Weights to begin with (`init_from=`): of a safetensors, .pt or .ckpt file, of a checkpoint or a run of ours. Nothing in them is executed.

init_from=RUN  init_from=RUN/checkpoints/best  init_from=FILE.safetensors  init_from=FILE.ckpt  '+init_from_keys={module.:""}'
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_train.checkpoint import catalog
from ddp_train.checkpoint.foreign_files import read_pickled, read_safetensors
from ddp_train.checkpoint.foreign_form import require_known_form
from ddp_train.checkpoint.read import damage_of
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, UserError, join_few
from ddp_train.interfaces.batch import describe
from ddp_train.interfaces.strategy import is_sharded, local_rows, shard_like
from ddp_train.run_folder.paths import RunFolder
from ddp_train.training.state.weights import read_weights


def load_initial_weights(path: Path, model: nn.Module, world: World, *, renames: Mapping[str, str], is_strict: bool) -> list[str]:
    """Put weights into a model on all ranks: rank 0 reads and checks, the others get its weights. Collective.

    Floating-point values may be cast to the model's type; a line names them.

    Args:
        renames: prefix of a key -> its new prefix; of several that fit, the longest counts.
        is_strict: refuse when the file and the model have not the same keys and shapes; False: load what fits, and name the rest.

    Returns lines for the screen, on rank 0. Raises UserError there: the file cannot be read safely, or does not fit.
    """
    fitting, lines = fit(path, model, renames, is_strict=is_strict) if world.is_main else ({}, [])
    names = set(world.from_main(lambda: list(fitting)))  # here the others wait when rank 0 refuses
    for name, tensor in _tensors(model).items():
        if not is_sharded(tensor):
            if name in fitting:
                tensor.copy_(fitting[name])
            world.copy_from(0, tensor)
        elif name in names:  # each rank takes its rows of the whole tensor; other ranks have one whole tensor in memory at a time
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            if name in fitting:
                whole.copy_(fitting[name])
            world.copy_from(0, whole)
            local_rows(tensor).copy_(local_rows(shard_like(whole, tensor)))
    return lines


def fit(path: Path, model: nn.Module, renames: Mapping[str, str], *, is_strict: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that the model takes, by its names, and lines for the screen. The model may be on the meta device."""
    source, weights = _read(path)
    weights = _rename(weights, renames, source)
    wanted = _tensors(model)
    shared = [name for name in wanted if name in weights]
    wrong = {
        "missing": [name for name in wanted if name not in weights],
        "extra": [name for name in weights if name not in wanted],
        "another shape": [_compare(name, weights, wanted) for name in shared if weights[name].shape != wanted[name].shape],
        "another type": [_compare(name, weights, wanted) for name in shared if not _can_cast(weights[name], wanted[name])],
    }
    listed = [f"    {kind:<14} {join_few(names)}" for kind, names in wrong.items() if names]
    fitting = [name for name in shared if weights[name].shape == wanted[name].shape and _can_cast(weights[name], wanted[name])]
    if (listed and is_strict) or not fitting:
        raise ConfigError(
            key="init_from",
            happened="\n".join([f"{source} does not fit the model", *listed]),
            expected="the same keys and shapes as the model's",
            fix="'+init_from_keys={OLD_PREFIX:\"NEW_PREFIX\"}' for renamed keys, or init_from_strict=false to load what fits",
        )
    cast = [_compare(name, weights, wanted) for name in fitting if weights[name].dtype != wanted[name].dtype]
    return {name: weights[name] for name in fitting}, [
        f"weights  {len(fitting)} of {len(wanted)} tensors from {source}",
        *([f"    cast           {join_few(cast)}"] if cast else []),
        *listed,
    ]


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    if path.suffix == ".safetensors":
        return str(path), read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.is_dir():
        return str(path), read_pickled(path)
    require_known_form(path)
    name = path if catalog.is_checkpoint(path) else RunFolder(path).checkpoints / catalog.LAST
    checkpoint = catalog.find_checkpoint(name, damage_of, key="init_from")
    return str(checkpoint), read_weights(checkpoint)["model"]


def _rename(weights: Mapping[str, Tensor], renames: Mapping[str, str], source: str) -> dict[str, Tensor]:
    longest_first = sorted(renames, key=len, reverse=True)
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix = next((prefix for prefix in longest_first if name.startswith(prefix)), "")
        new = (renames.get(prefix, "") + name.removeprefix(prefix)).replace("_orig_mod.", "")  # of a module that torch.compile has wrapped
        if new in renamed:
            raise UserError(key="init_from_keys", happened=f"two tensors of {source} would be called {new}", expected="different names")
        renamed[new] = tensor
    return renamed


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _can_cast(source: Tensor, target: Tensor) -> bool:
    return source.dtype == target.dtype or (source.is_floating_point() and target.is_floating_point())


def _compare(name: str, weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    return f"{name} ({describe(weights[name])} -> {describe(wanted[name])})"
