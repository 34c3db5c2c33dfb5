"""Rules of the strategies: what each cannot do, with the keys of other sections. Each yields the problems that it finds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddp_train.config.batch_sizes import MICRO_BATCH
from ddp_train.config.run_config import PartialConfig
from ddp_train.config.targets.locate import class_constants, class_of
from ddp_train.config.tree import dotted_items
from ddp_train.errors import ConfigError, conflict, plural
from ddp_train.traits import ObjectiveConstants, StrategyConstants, needs_whole_matrices, steps_parameters_alone, whole_matrices_error

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_strategy(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse what a strategy cannot do: arguments against accumulation or the number of ranks, whole matrices where rows are kept."""
    strategy, num_micro_batches, world_size = config.strategy, config.num_micro_batches, config.batch.world_size
    if world_size == 1:
        return
    count = f"perhaps several ({MICRO_BATCH}=auto)" if config.batch.is_open else num_micro_batches
    for key, value in given(strategy, class_constants(strategy, StrategyConstants).refuses_accumulation):
        if value and count != 1:
            yield conflict(key, f"is true, with {count} micro-batches a step", "false")
    for key, value in given(strategy, class_constants(strategy, StrategyConstants).divides_ranks):
        if isinstance(value, int) and (value < 1 or world_size % value):
            yield ConfigError(key=key, happened=f"is {value}, on {world_size} ranks", expected="a divisor of the number of ranks")
    named = [(key, str(value)) for key, value in dotted_items({"optimizer": config.optimizer}) if key.endswith("._target_")]
    if class_constants(strategy, StrategyConstants).shards_optimizer:
        for key, path in named:
            if needs_whole_matrices(class_of(path)):
                yield whole_matrices_error(key.removesuffix("._target_"), path.rpartition(".")[2])


def check_cuda_graphs(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse CUDA graphs with gradients outside of DDP's buckets, where they are wrong, and under FSDP, where they are slow.

    Autograd takes what a graph gives for a parameter's gradient, and the next micro-batch's graph writes over it (pytorch issue 169545).
    FSDP's weights move from step to step, and graphs are recorded anew for some 2,000 steps (pytorch issue 183451).
    """
    mode, strategy = config.compile.mode, config.strategy
    if mode not in _WITH_CUDA_GRAPHS:
        return
    num_micro_batches, world_size = config.num_micro_batches, config.batch.world_size
    constants = class_constants(strategy, StrategyConstants)
    stays_with = constants.gradients_stay_with
    in_buckets = world_size > 1 and stays_with and all(bool(strategy.get(name)) == value for name, value in stays_with.items())
    if num_micro_batches > 1 and not in_buckets:
        accumulation = f"{num_micro_batches} micro-batches a step on {plural(world_size, 'rank')}"
        happened = f"is {mode}, whose CUDA graphs overwrite gradients, with {accumulation}"
        expected = "gradients in DDP's buckets (several ranks, strategy=ddp or zero1), or one micro-batch a step"
        fix = "compile=default, compile.mode=max-autotune-no-cudagraphs, or trainer.grad_accum_steps=1"
        yield ConfigError(key="compile.mode", happened=happened, expected=expected, fix=fix)
    if world_size > 1 and constants.shards_parameters:
        happened = f"is {mode}, and its CUDA graphs are recorded again whenever weights move, as under strategy=fsdp"
        fix = "compile=default, or compile.mode=max-autotune-no-cudagraphs"
        yield ConfigError(key="compile.mode", happened=happened, expected="no CUDA graphs with strategy=fsdp", fix=fix)


def given(strategy: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield key and value of a strategy's arguments, as far as they are given."""
    return ((f"strategy.{name}", strategy[name]) for name in names if name in strategy)


def check_early_step(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to step in backward with what needs all gradients of a step at a time, or where nothing would be saved."""
    trainer, strategy, batch = config.trainer, config.strategy, config.batch
    if not trainer.optimizer_in_backward:
        return
    with_it = "and trainer.optimizer_in_backward is true"
    if trainer.clip_grad_norm is not None:
        happened = f"is {trainer.clip_grad_norm}, which takes the norm of all gradients before the first step, {with_it}"
        yield conflict("trainer.clip_grad_norm", happened, "null")
    if config.num_micro_batches > 1 or batch.is_open:
        happened = f"a step has several micro-batches, whose gradients add up, {with_it}"
        fix = "a larger loader.micro_batch_size, or a smaller trainer.global_batch_size"
        yield ConfigError(key="loader.micro_batch_size", happened=happened, expected="one micro-batch a step on each rank", fix=fix)
    if config.health.on_nonfinite == "skip":
        yield conflict("health.on_nonfinite", f"is skip, which looks at all gradients before a step is taken, {with_it}", "rewind")
    if config.amp.get("dtype") == "float16":
        yield conflict("amp", f"is fp16, which looks at all gradients before a step is taken, {with_it}", "bf16 or amp=off")
    if not steps_parameters_alone(class_of(target := str(config.optimizer.get("_target_")))):
        expected = "one that steps each parameter by itself: torch's (AdamW, SGD), or a class with steps_parameters_alone = True"
        yield conflict("optimizer", f"is {target}, which may need all parameters in a step, {with_it}", "adamw", expected=expected)
    if batch.world_size > 1 and not class_constants(strategy, StrategyConstants).shards_parameters:
        expected = "strategy=fsdp, or one process: there a gradient is complete during backward, and its memory can be freed"
        yield conflict("strategy", f"is {str(strategy.get('_target_')).rpartition('.')[2]}, {with_it}", "fsdp", expected=expected)
    for key, value in given(strategy, class_constants(strategy, StrategyConstants).offloads):
        if value:
            yield conflict(key, f"is true: gradients move to the host separately, {with_it}", "false")


def check_open_micro_batch(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to let the device decide on a micro-batch where results depend on it."""
    if config.batch.is_open and class_constants(config.objective, ObjectiveConstants).compares_samples:
        happened = "is auto, and the objective compares the samples of a micro-batch: the gradient would depend on the device"
        yield conflict(MICRO_BATCH, happened, 32, expected="a number")


def check_loss_scale(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse fp16, which needs a loss scale, with a strategy that cannot have one."""
    why = class_constants(config.strategy, StrategyConstants).refuses_loss_scale
    if why and config.batch.world_size > 1 and config.amp.get("dtype") == "float16":
        yield ConfigError(key="amp.dtype", happened=f"is float16, and {why}", expected="a type that needs no loss scale", fix="amp=bf16")
