"""The model and the objective of a run: made, known by the names that a user knows, computed and laid out as `precision` says."""

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_train.amp import best_dtype
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import PrecisionConfig
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.interfaces import LossModule, Objective, Strategy
from ddp_train.interfaces.objective import module_of
from ddp_train.training.build.make import make_objective
from ddp_train.training.instantiate import instantiate
from ddp_train.training.seeding import random_state, seed_all, set_random_state
from ddp_train.traits import ObjectiveConstants, constants_of, name_of, unadapted

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


def build_model(config: RunConfig, world: World, answers: Mapping[str, Any], *, is_filled: bool = False) -> nn.Module:
    """Return the model, with the initial weights that it has on every rank and for every number of ranks; made where the world is meta.

    `is_filled`: the strategy fills models without values from rank 0's: the other ranks return such a one, if it can be made. Collective.
    """

    def make() -> nn.Module:
        seed_all(config.seed)
        model = instantiate(config.model, key="model", answers=answers)
        if not isinstance(model, nn.Module):
            raise ConfigError(key="model._target_", happened=f"gave a {type(model).__name__}", expected="a torch.nn.Module")
        return model

    model = make_without_values(make) if is_filled and not world.is_main else None
    if model is None:
        with world.device if world.device.type == "meta" else nullcontext():
            model = make()
    if is_filled:  # without values nothing was drawn
        set_random_state(world.from_main(lambda: random_state(_HOST)), _HOST)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            happened = f"{name or 'the model'} is an {type(module).__name__} with sparse=True"
            expected = "dense gradients: sparse ones cannot be summed over ranks, clipped or measured"
            raise ConfigError(key="model", happened=happened, expected=expected, fix="sparse=False")
    if config.precision.channels_last:  # weights, too: a convolution's output lies as its weights do
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


class ModelAndObjective(NamedTuple):
    model: nn.Module
    objective: Objective
    trained_module: nn.Module  # both in one where the objective has a state of its own, else the model


def build_model_and_objective(config: RunConfig, world: World, answers: Mapping[str, Any], strategy: Strategy) -> ModelAndObjective:
    """Make the model, and the objective that may bind it or borrow weights."""
    model = build_model(config, world, answers, is_filled=strategy.shards_parameters and world.size > 1)
    with world.device if world.device.type == "meta" else nullcontext():
        objective = make_objective(config.objective, answers, world.device)
    if getattr(objective.bind_model, "__func__", None) is not Objective.bind_model:
        lacks_values = world.device.type != "meta" and any(tensor.is_meta for tensor in _tensors_of(model))
        if lacks_values and not constants_of(objective, ObjectiveConstants).binds_without_values:
            streams = random_state(_HOST)
            model = build_model(config, world, answers)
            set_random_state(streams, _HOST)
        objective.bind_model(model)
    if objective.borrows and world.device.type != "meta":  # on which there is nothing to load into
        from ddp_train.training.state.initial_weights import load_initial_weights

        for part, source in objective.borrows.items():
            world.print(*load_initial_weights(Path(source), getattr(objective, part), world, renames={}, is_strict=True))
    return ModelAndObjective(model, objective, LossModule(model, objective) if has_state(objective) else model)


def has_state(objective: Objective) -> bool:
    """Tell whether an objective has something to train, to share or to save. A part that evaluates keeps its buffers as they are.

    Raises ConfigError: it has parameters to train outside of any module.
    """
    if (module := module_of(objective)) is not None:
        changing = (buffer for part in module.modules() if part.training for buffer in part.buffers(recurse=False))
        return any(parameter.requires_grad for parameter in module.parameters()) or any(True for _ in changing)
    for name, value in getattr(unadapted(objective), "__dict__", {}).items():
        held = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else []
        if any(tensor.requires_grad for tensor in held):
            happened = f"{name_of(objective)}.{name} has parameters to train, but {name_of(objective)} is not a torch.nn.Module"
            expected = "an nn.Module, whose parameters are found, trained and saved"
            fix = f"class {name_of(objective)}(nn.Module), with super().__init__(); or {name}.requires_grad_(False)"
            raise ConfigError(key="objective", happened=happened, expected=expected, fix=fix)
    return False


def note_methods_not_called(model: nn.Module) -> str:
    """Return a line for a model that brings a training step of its own, as LightningModules do; "" for any other."""
    methods = [name for name in ("training_step", "validation_step", "configure_optimizers") if callable(getattr(model, name, None))]
    if "training_step" not in methods:
        return ""
    return f"model    {', '.join(methods)} of {type(model).__name__} are not called: the objective, optimizer and scheduler of this run are"


def use_precision(config: PrecisionConfig) -> None:
    """Set what holds for the whole process."""
    if config.float32_matmul_precision != "highest":  # torch's own; setting it would cut off what follows `torch.backends.fp32_precision`
        torch.set_float32_matmul_precision(config.float32_matmul_precision)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark


def shared_dtype(world: World) -> str | None:
    """Return the type that `amp.dtype=auto` stands for on all ranks: half precision where each device has it. Collective."""
    dtypes = set(world.gather(best_dtype(world.device)))
    return dtypes.pop() if len(dtypes) == 1 else None


def make_without_values(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model whose parameters and buffers have no values; None: it would be another model than one with them.

    A strategy that cuts the model among the ranks takes rank 0's values, block by block. If each rank of a machine made a model with
    values, all of them would be in the host's memory before any is sharded.

    It would where its constructor reads a value, draws random numbers on a device that it names, or keeps a tensor that stays empty,
    for it is neither parameter nor buffer.
    """
    earlier_tensors = _meta_tensors()
    try:
        with torch.device("meta"):
            model = make()
        state_ids = {id(tensor) for tensor in _tensors_of(model)}
        drawn = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed())
        if not torch.equal(drawn, torch.get_rng_state()):
            raise ValueError("its constructor draws random numbers itself")
        if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
            raise ValueError("it has parameters of a custom class")
        gc.collect()
        if not _meta_tensors().keys() <= earlier_tensors.keys() | state_ids:
            raise ValueError("it keeps tensors that are neither parameters nor buffers")
    except Exception as error:
        logger.info("the model is made with values on this rank, too: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        return None
    return model


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return list(chain(model.parameters(), model.buffers()))


def _meta_tensors() -> dict[int, Tensor]:
    """Return all tensors of this process that have no values, by their identities, which last as long as the result."""
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), Tensor) and item.is_meta}
