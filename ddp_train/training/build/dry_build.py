"""The sizes of a run without the run: it is built as on a rank, but its model has shapes and no values (torch's meta device)."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ddp_train.config.run_config import RunConfig
from ddp_train.distributed.world import alone
from ddp_train.training.build.build import build
from ddp_train.training.check.memory import estimate_checkpoint, memory_by_part
from ddp_train.training.state.initial_weights import fit


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a run will have; travels between processes as JSON."""

    model: str  # the class
    layers: list[str]  # lines of a table (`summary`)
    parameters: int
    trained_parameters: int  # of them
    steps: int
    steps_per_epoch: int | None  # None: the data has no epochs
    epoch_size: int | None  # samples
    rank_bytes: dict[str, int]  # what each rank keeps, by part (`memory_by_part`)
    shards: int  # of the weights; 1: each rank has all
    on_host: bool  # what each rank keeps is not on its device
    checkpoint_bytes: int


def measure(config: RunConfig) -> Sizes:
    """Build a run on the meta device, and return its sizes. The data is opened as on rank 0. For a process that does nothing else.

    Raises UserError: as `build` does, and where the weights of `init_from` are here and do not fit.
    Raises Exception: the model needs values while it is made.
    """
    # torch keeps its compiler away from this method, and imports it for that, which takes a second: nothing is compiled here.
    Optimizer.add_param_group = inspect.unwrap(Optimizer.add_param_group)  # type: ignore[method-assign]
    components = build(config, alone("meta"))
    if config.init_from is not None and (weights := Path(config.init_from)).exists() and not config.runs_before():
        fit(weights, components.model, config.init_from_keys, is_strict=config.init_from_strict)
    parameters = list(components.model.parameters())
    ranks = config.batch.world_size
    memory = components.strategy.rank_memory(components.trained_module, ranks)
    order = components.train_loader.order
    return Sizes(
        model=type(components.model).__name__,
        layers=layer_table(components.model, depth=config.summary) if config.summary else [],
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        steps=components.total_steps,
        steps_per_epoch=order.steps_per_epoch,
        epoch_size=order.epoch_size,
        rank_bytes=memory_by_part(components, num_ranks=ranks),
        shards=memory.parameter_shards,
        on_host=memory.on_host,
        checkpoint_bytes=estimate_checkpoint(components, num_ranks=ranks),
    )


def layer_table(model: nn.Module, *, depth: int) -> list[str]:
    """Return the lines of a table: each part of the model down to `depth` levels, its class, and how many parameters it has and trains.

    Shapes are those of a part's own parameters. One that an earlier part has too (tied weights) is named after it, and counted in both.
    """
    rows = [("layer", "class", "parameters", "trained", "shapes"), *_rows(model, depth)]
    layer, kind, count, trained = (max(len(row[column]) for row in rows) for column in range(4))
    return [f"{row[0]:<{layer}}  {row[1]:<{kind}}  {row[2]:>{count}}  {row[3]:>{trained}}  {row[4]}".rstrip() for row in rows]


def _rows(model: nn.Module, depth: int) -> Iterator[tuple[str, str, str, str, str]]:
    owners: dict[int, str] = {}  # the id of a parameter -> the name under which it was listed
    for path, module in model.named_modules():
        level = path.count(".") + 1 if path else 0
        own_parameters = [(name, parameter) for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)]
        if level > depth or (level == 0 and not own_parameters):
            continue
        shapes = []
        for name, parameter in own_parameters:
            full = f"{path}.{name}".lstrip(".")
            owner = owners.setdefault(id(parameter), full)
            shapes.append(f"{name} {list(parameter.shape)}" if owner == full else f"{name} = {owner}")
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        trained_sizes = [parameter.numel() for parameter in parameters if parameter.requires_grad]
        name = "  " * (level - 1) + path.rpartition(".")[2] if path else "(itself)"
        counts = (f"{sum(sizes):,}", f"{sum(trained_sizes):,}") if parameters else ("", "")
        yield name, type(module).__name__, *counts, ", ".join(shapes)
