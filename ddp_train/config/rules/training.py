"""Rules of what is trained and how long: samples, batches, steps, epochs and the loss. Each yields the problems that it finds."""

from collections.abc import Iterator

from ddp_train.config.run_config import PartialConfig
from ddp_train.config.schema import EvaluationConfig, Sections, TrainerConfig
from ddp_train.config.targets.locate import class_constants, class_of, constants_of_ours
from ddp_train.errors import ConfigError, conflict
from ddp_train.traits import DataConstants, ObjectiveConstants, loss_unit


def check_epochs(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse to count in epochs where the class of the data is a stream of unknown length."""
    kind = class_of(path := str(config.data.get("_target_")))
    if any(each.__name__ == "IterableDataset" for each in kind.__mro__) and not hasattr(kind, "__len__"):
        yield from without_epochs(path.rpartition(".")[2], config.trainer, config.evaluation, config.is_evaluated)


def without_epochs(name: str, trainer: TrainerConfig, evaluation: EvaluationConfig, is_evaluated: bool) -> Iterator[ConfigError]:
    """Refuse to count in epochs where the data has none."""
    needed = [("trainer.max_steps", trainer.max_steps, 1000)]
    needed += [("evaluation.every_steps", evaluation.every_steps, 100)] if is_evaluated else []
    for key, value, example in needed:
        if value is None:
            happened = f"is null, and {name} does not say how many samples it has: there are no epochs"
            yield conflict(key, happened, example, expected="a number of steps")


def check_own_loss(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse for models that return their own loss what gives no dict with labels, and a class that does not say what its loss is."""
    loader = config.loader
    if not class_constants(config.objective, ObjectiveConstants).loss_is_models:
        return
    dataset, path = str(config.data.get("_target_")), str(config.model.get("_target_"))
    is_pair = class_constants(config.data, DataConstants).gives_pairs
    if loader.collate is None and (is_pair or loader.fields is not None):
        happened = f"{dataset.rpartition('.')[2]} gives pairs" if is_pair else f"is {loader.fields}, which makes tuples of dicts"
        expected = "for objective=transformers a dict of the model's arguments, with `labels`"
        fix = "objective=classification or language_modeling" if is_pair else "loader.fields=null"
        yield ConfigError(key="data" if is_pair else "loader.fields", happened=happened, expected=expected, fix=fix)
    kind = class_of(path)
    if config.objective.get("unit") in (None, "auto") and kind.__name__ == path.rpartition(".")[2]:  # a function may give another class
        loss_unit(kind)


def missing_labels(config: Sections) -> Iterator[ConfigError]:
    """Refuse data without labels for an objective of this library that needs them: before a run begins, and not for `ddp-train predict`."""
    argument = constants_of_ours(config.data, DataConstants).labels_argument
    if config.data.get(argument) is False and constants_of_ours(config.objective, ObjectiveConstants).needs_labels:
        happened = "is false: a batch has images only, and the objective needs labels"
        yield conflict(f"data.{argument}", happened, "true", expected="true; false is for `ddp-train predict`")


def check_batch_size_schedule(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse batch sizes that change together with what needs one size."""
    trainer, loader, world_size, key = config.trainer, config.loader, config.batch.world_size, "trainer.batch_size_schedule"
    if not trainer.batch_size_schedule:
        return
    if (least := min(change.value for change in trainer.batch_size_schedule)) < world_size:
        yield ConfigError(key=key, happened=f"has a size of {least} for {world_size} ranks", expected="at least one sample per rank")
    if trainer.grad_accum_steps is not None:
        happened = f"is {trainer.grad_accum_steps}, and {key} changes the global batch"
        expected = "null: it follows from the size, loader.micro_batch_size and the number of ranks"
        yield conflict("trainer.grad_accum_steps", happened, "null trainer.global_batch_size=SIZE", expected=expected)
    fixed = {"loader.drop_last": (loader.drop_last, "false"), "loader.bucket_batches": (loader.bucket_batches, "null")}
    for name, (value, without) in {**fixed, "debug.overfit": (config.debug.overfit, "false")}.items():
        if value:
            yield conflict(name, f"is {value}, and {key} is given", without)


def check_lengths(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse pieces into which a window cannot be cut evenly, where the config says how long it is; else a rank checks it."""
    whole = config.data.get("context_length")
    lengths = [change.value for change in config.trainer.length_schedule or ()]
    if isinstance(whole, int) and (uneven := [length for length in lengths if whole % length]):
        yield uneven_length(uneven[0], whole)


def uneven_length(length: int, whole: int) -> ConfigError:
    """Return what is wrong with a length that does not divide that of the windows."""
    near = max(each for each in range(1, min(length, whole) + 1) if whole % each == 0)
    happened = f"has a length of {length}, and windows have {whole} tokens (data.context_length)"
    return ConfigError(key="trainer.length_schedule", happened=happened, expected=f"lengths that divide it, as {near}")


def check_loader(config: PartialConfig) -> Iterator[ConfigError]:
    """Refuse workers for data that is on the device; check that there are weights where samples are drawn by weight, and nowhere else."""
    loader = config.loader
    if loader.on_device and loader.num_workers:
        happened = f"is {loader.num_workers}, but loader.on_device=true leaves nothing to read"
        yield conflict("loader.num_workers", happened, 0, expected="no workers")
    if loader.sampler is not None and loader.sampling != "shuffled":
        happened = f"is {loader.sampling}, and loader.sampler says which sample comes when"
        yield conflict("loader.sampling", happened, "shuffled, which leaves it to the sampler")
    is_weighted = loader.sampling == "weighted"
    if is_weighted != (loader.sample_weights is not None):
        happened = "is not given" if is_weighted else f"is given, but loader.sampling is {loader.sampling}"
        expected = "a file of weights with loader.sampling=weighted, and none without"
        fix = "loader.sample_weights=FILE.npy" if is_weighted else "loader.sampling=weighted"
        yield ConfigError(key="loader.sample_weights", happened=happened, expected=expected, fix=fix)


def check_steps(config: PartialConfig) -> Iterator[ConfigError]:
    """Check that the run ends, and that the scheduler's phases fit into it (by epochs, a rank checks when it knows the data)."""
    trainer, scheduler = config.trainer, config.scheduler
    if trainer.max_steps is None and trainer.max_epochs is None:
        yield ConfigError(key="trainer.max_steps", happened="neither max_steps nor max_epochs is given", fix="trainer.max_steps=1000")
        return
    phases = {name: scheduler[name] for name in ("warmup_steps", "decay_steps") if isinstance(scheduler.get(name), int)}
    negative = [name for name, value in phases.items() if value < 0]
    for name in negative:
        yield ConfigError(key=f"scheduler.{name}", happened=f"is {phases[name]}", expected="at least 0")
    if not negative and trainer.max_steps is not None and sum(phases.values()) > trainer.max_steps:
        shown = " + ".join(f"{name} {value}" for name, value in phases.items())
        happened, expected = f"{shown}: more than the run's {trainer.max_steps} steps", "a schedule that fits into trainer.max_steps"
        fix = f"scheduler.warmup_steps={trainer.max_steps // 10}, or a longer run"
        yield ConfigError(key=f"scheduler.{next(iter(phases))}", happened=happened, expected=expected, fix=fix)
