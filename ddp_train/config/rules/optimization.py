"""Keys of ours inside the nodes of optimizer and scheduler: groups, rates by layer and by batch, and when a scheduler moves on.

These keys are no arguments of the components (`schema.KEYS_BESIDE_ARGUMENTS`); what they must be is checked here. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.run_config import LR_SCALES, PartialConfig
from ddp_train.config.spelling import nearest, removal
from ddp_train.config.targets.locate import accepts, look_up_or_none, parameters_of, takes
from ddp_train.config.targets.target import own_keys
from ddp_train.errors import ConfigError, conflict
from ddp_train.traits import follows_a_metric

_TAKES_GROUPS = "an optimizer that takes parameter groups, as torch's do"


def check_optimizer(config: PartialConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with our keys in the optimizer's node. What is wrong with the node itself is said elsewhere."""
    path = config.optimizer.get("_target_", "")
    if (target := look_up_or_none(path)) is None:
        return
    settings = own_keys(config.optimizer, "optimizer")
    groups, decay, sorts_itself = settings.get("groups"), settings.get("layer_decay"), accepts(target, "model")
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
    """Yield what is wrong with `lr_scale` and `base_batch_size`, and what would take no notice of them."""
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
    """Yield what is wrong with our keys in the scheduler's node."""
    path = config.scheduler.get("_target_")
    if (target := look_up_or_none(path)) is None:
        return
    settings = own_keys(config.scheduler, "scheduler")
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
