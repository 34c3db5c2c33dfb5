"""Rules of what is trained and how long: samples, batches, steps, the loss, the optimizer. Each yields the problems that it finds."""

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.batch_sizes import LR_SCALES
from ddp_train.config.run_config import PartialConfig
from ddp_train.config.schema import EvaluationConfig, Sections, TrainerConfig
from ddp_train.config.spelling import nearest, removal
from ddp_train.config.targets.locate import class_constants, class_of, constants_of_ours, look_up_or_none
from ddp_train.config.targets.target import declares, follows_a_metric, framework_keys, parameters_of, takes
from ddp_train.errors import ConfigError, conflict
from ddp_train.traits import DataConstants, ObjectiveConstants, loss_unit

_TAKES_GROUPS = "an optimizer that takes parameter groups, as torch's do"


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


def check_optimizer(config: PartialConfig) -> Iterator[ConfigError]:
    """Yield the problems of our keys in the optimizer's config. `check_target` finds those of its arguments."""
    path = config.optimizer.get("_target_", "")
    if (target := look_up_or_none(path)) is None:
        return
    settings = framework_keys(config.optimizer, "optimizer")
    groups, decay, sorts_itself = settings.get("groups"), settings.get("layer_decay"), declares(target, "model")
    if decay is not None and (isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1):
        yield conflict("optimizer.layer_decay", f"is {decay!r}", "0.75, which is usual", expected="a number above 0 and at most 1, or null")
    if decay is not None and sorts_itself:
        happened, expected = f"is given, and {path} takes the model and sorts its parameters itself", _TAKES_GROUPS
        yield conflict("optimizer.layer_decay", happened, "null, or optimizer=adamw", expected=expected)
    if not isinstance(groups, Mapping | None):
        expected = "a name for each group, and what it has: match, and lr, weight_decay or freeze"
        fix = "'+optimizer.groups.head={match: head, lr: 0.01}'"
        yield ConfigError(key="optimizer.groups", happened=f"is {groups!r}", expected=expected, fix=fix)
    else:
        for name, group in (groups or {}).items():
            yield from _group(f"optimizer.groups.{name}", group, target, path, sorts_itself=sorts_itself)
    yield from _check_rates(settings, config)


def _group(key: str, group: Any, target: Any, path: str, *, sorts_itself: bool) -> Iterator[ConfigError]:
    example = "{match: head, lr: 0.01}"
    if not isinstance(group, Mapping):
        yield ConfigError(key=key, happened=f"is {group!r}", expected="match, and lr, weight_decay or freeze", fix=f"'{key}={example}'")
        return
    match, options = group.get("match"), [name for name in group if name not in ("match", "freeze")]
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not patterns or not all(isinstance(each, str) and each for each in patterns):
        expected = "a pattern of parameters' names, or a list of them: head, '*.bias', [layers.0,layers.1]"
        yield ConfigError(key=f"{key}.match", happened="is not given" if match is None else f"is {match!r}", expected=expected)
    if not isinstance(group.get("freeze", False), bool):
        yield ConfigError(key=f"{key}.freeze", happened=f"is {group['freeze']!r}", expected="true or false")
    if group.get("freeze") and options:
        happened = "is given with freeze=true, and frozen parameters are not trained"
        fix = f"remove it: {removal(f'{key}.{options[0]}', group[options[0]])}"
        yield ConfigError(key=f"{key}.{options[0]}", happened=happened, expected="one of the two", fix=fix)
    elif not group.get("freeze") and not options:
        expected, fix = "lr, weight_decay or freeze", f"'{key}={example}'"
        yield ConfigError(key=key, happened="has only match, and changes nothing", expected=expected, fix=fix)
    for name in options:
        if name == "params" or not takes(target, name):
            known = [each for each in [*(parameters_of(target) or ())][1:] if each != "params"]
            close = nearest(name, [*known, "match", "freeze"])
            happened = f"{path} has no argument {name!r}"
            fix = f"did you mean {key}.{close}?" if close else f"remove it: {removal(f'{key}.{name}', group[name])}"
            yield ConfigError(key=f"{key}.{name}", happened=happened, expected=f"match, freeze, or one of {', '.join(known)}", fix=fix)
        elif sorts_itself:
            happened, fix = f"is given, and {path} takes the model and sorts its parameters itself", "optimizer=adamw"
            yield ConfigError(key=f"{key}.{name}", happened=happened, expected=f"freeze=true alone, or {_TAKES_GROUPS}", fix=fix)


def _check_rates(settings: Mapping[str, Any], config: PartialConfig) -> Iterator[ConfigError]:
    """Yield the problems of `lr_scale` and `base_batch_size`, and the rates that they would not change."""
    scale, base, off = settings.get("lr_scale"), settings.get("base_batch_size"), "null optimizer.base_batch_size=null"
    if scale not in (None, *LR_SCALES):
        yield ConfigError(key="optimizer.lr_scale", happened=f"is {scale!r}", expected="linear (SGD), sqrt (Adam and similar) or null")
    if base is not None and (isinstance(base, bool) or not isinstance(base, int) or base < 1):
        yield ConfigError(key="optimizer.base_batch_size", happened=f"is {base!r}", expected="a number of samples, at least 1")
    if (scale is None) != (base is None):
        missing, given = ("lr_scale", "base_batch_size") if scale is None else ("base_batch_size", "lr_scale")
        happened = f"is not given, and optimizer.{given} is {settings[given]}"
        expected = "both: how learning rates scale with the global batch, and the batch for which they were tuned"
        fix = "optimizer.lr_scale=linear optimizer.base_batch_size=256, or optimizer.lr_scale=sqrt for Adam"
        yield ConfigError(key=f"optimizer.{missing}", happened=happened, expected=expected, fix=fix)
    if scale is not None and (absolute := sorted({"max_lr", "base_lr"} & config.scheduler.keys())):
        happened = f"sets the rate itself, so that optimizer.lr_scale={scale} would change nothing"
        expected, fix = "a scheduler of factors, as ours and most of torch's are", f"scheduler=warmup_cosine, or optimizer.lr_scale={off}"
        yield ConfigError(key=f"scheduler.{absolute[0]}", happened=happened, expected=expected, fix=fix)
    if scale is not None and config.trainer.batch_size_schedule:
        yield conflict("optimizer.lr_scale", f"is {scale}, and trainer.batch_size_schedule has several sizes: the rate follows one", off)


def check_scheduler(config: PartialConfig) -> Iterator[ConfigError]:
    """Yield the problems of our keys in the scheduler's config."""
    path = config.scheduler.get("_target_")
    if (target := look_up_or_none(path)) is None:
        return
    settings = framework_keys(config.scheduler, "scheduler")
    every, metric, follows = settings.get("every"), settings.get("metric"), follows_a_metric(target)
    if every not in (None, "step", "epoch"):
        yield ConfigError(key="scheduler.every", happened=f"is {every!r}", expected="step or epoch")
    elif every == "epoch" and follows:
        happened = "is epoch, and ReduceLROnPlateau steps after each evaluation"
        expected = "evaluation.every_steps as its period; null means every epoch"
        fix = f"remove it: {removal('scheduler.every', every)}"
        yield ConfigError(key="scheduler.every", happened=happened, expected=expected, fix=fix)
    if metric is not None and not follows:
        yield conflict("scheduler.metric", f"is given, and {path} follows no metric", "null, or scheduler=plateau", expected="null")
    elif not isinstance(metric, str | None):
        yield ConfigError(key="scheduler.metric", happened=f"is {metric!r}", expected="the name of a metric of the evaluation, or null")
    if follows and "data" in config.tree and not config.is_evaluated:
        happened = "follows a metric of the evaluation, and data.eval is null: nothing is evaluated"
        yield conflict("scheduler", happened, "warmup_cosine", expected="an evaluation split, or a scheduler of steps")
