"""Arguments that are `auto`, and the facts that answer them. Imports no torch; docs/decisions/0005-auto.md has the reasons.

An `auto` gets the fact with its argument's name, also in components within one: of the data in model, objective and evaluation.metrics, of
the run in scheduler and metrics, of the devices in amp. (`loader.micro_batch_size` is measured: training/check/micro_batch.py.) Without a
fact it is null if that is the argument's default (the class can do without), it stays if the class gives `auto` a meaning (as its default,
or annotated as text), and else it is an error. Answers are stored by their dotted keys, `model.num_classes`.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_train.config.schema import EVALUATION_METRICS
from ddp_train.config.spelling import nearest, override, text_of
from ddp_train.config.targets.locate import look_up
from ddp_train.config.targets.target import AUTO, DIRECTIVES, FACTS, admits_text, hints_of
from ddp_train.config.tree import ComponentConfig, replace_values, value_at
from ddp_train.errors import ConfigError, one_line

BY_DATA = ("model", "objective", EVALUATION_METRICS)
BY_RUN = {name: FACTS[name] for name in ("scheduler", "metrics")}

_ALSO_CALLED = {
    "num_labels": "num_classes",  # by transformers
    "num_training_steps": "total_steps",
    **dict.fromkeys(("T_max", "total_iters"), "total_steps"),  # by torch
}
_TEXT = ("vocab_size", "context_length")
_SHOWN = 200  # characters of a fact
_NOT_KNOWN = object()


def find_unanswerable(tree: Mapping[str, Any], sections: tuple[str, ...]) -> Iterator[ConfigError]:
    """Yield an error for every `auto` of these sections that nothing can answer, as far as is known without the data."""
    for section in sections:
        for key, name, owner in _autos(value_at(tree, section), section, "", None):
            if section in BY_DATA and name:
                continue
            default, has_meaning = _argument(owner, name)
            if has_meaning or _ALSO_CALLED.get(name, name) in BY_RUN.get(section, ()) or (default is None and section in BY_RUN):
                continue
            own = f" ({', '.join(BY_RUN[section])})" if section in BY_RUN else ""
            expected = f"a value; auto takes facts of the data in model and objective, of the run in scheduler and metrics{own}"
            happened = "is auto, and nothing provides a value" + ("" if name else ": in a list it has no name")
            can_be_typed = default is None or isinstance(default, (bool, int, float, str, list, tuple))
            fix = override(key, yaml_value(default)) if can_be_typed else f"{key}=VALUE"
            yield ConfigError(key=key, happened=happened, expected=expected, fix=fix)


def answer(tree: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer for every `auto` below these sections. ConfigError: it names all that the facts do not answer."""
    answers, unanswered = dict[str, Any](), dict[str, str]()
    for section, values in tree.items():
        for key, name, owner in _autos(values, section, "", None):
            fact = name if name in facts else _ALSO_CALLED.get(name, name)
            default, has_meaning = _argument(owner, name)
            if fact in facts:
                answers[key] = facts[fact]
            elif default is None and not has_meaning:
                answers[key] = None
            elif not has_meaning:
                unanswered[key] = name
    if unanswered:
        raise _unanswered(unanswered, facts)
    return answers


def with_answers(value: Any, key: str, answers: Mapping[str, Any]) -> Any:
    """Return a part of a configuration with answers instead of its `auto`s."""
    return replace_values(value, key, lambda path, leaf: answers.get(path, leaf) if _is_auto(leaf) else leaf)


def keys(tree: Mapping[str, Any]) -> list[str]:
    """Return the keys of every `auto` whose answer belongs to the experiment; those of `metrics` belong to one attempt."""
    sections = (*BY_DATA, "scheduler", "amp", "loader.micro_batch_size")
    return [key for section in sections for key, _, _ in _autos(value_at(tree, section), section, "", None)]


def yaml_value(value: Any) -> Any:
    """Return a fact as config.yaml can hold it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): yaml_value(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # of numpy and torch
        return value.tolist()
    return [yaml_value(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def refuse_changed(answers: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Refuse to continue a run with data whose answers have changed. The run's own facts may change: `trainer.max_steps`."""
    for key, value in answers.items():
        if key.startswith(BY_DATA) and key in before and before[key] != value:
            happened = f"is auto: the data said {_shown(before[key])} when the run began, and says {_shown(value)} now"
            fix = f"{override(key, before[key])}, to continue the run with it"
            raise ConfigError(key=key, happened=happened, expected="the data that the run began with", fix=fix)


def require_kind(answers: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to evaluate a model, with the `answers` of its run, on data of another kind. Facts that the data lacks are not compared."""
    for key, value in answers.items():
        name = key.rpartition(".")[2]
        fact = yaml_value(facts.get(_ALSO_CALLED.get(name, name)))
        if key.split(".")[0] in BY_DATA and fact is not None and value is not None and fact != value:
            happened = f"it has {name} {_shown(fact)}, and the model was made for {_shown(value)} ({key})"
            raise ConfigError(key="data", happened=happened, expected="data of the kind that the run was trained on")


def _unanswered(unanswered: Mapping[str, str], facts: Mapping[str, Any]) -> ConfigError:
    known = ", ".join(f"{name}={_shown(value)}" for name, value in facts.items())
    values = {key: nearest(name, facts) for key, name in unanswered.items()}
    typed = " ".join(override(key, yaml_value(facts[near])) if near else f"{key}=VALUE" for key, near in values.items())
    is_text = not {*unanswered.values()}.isdisjoint(_TEXT)
    giver = "the run" if next(iter(unanswered)).partition(".")[0] in BY_RUN else "the data"
    happened = f"{'is' if len(unanswered) == 1 else 'are'} auto, and {giver} does not provide {'it' if len(unanswered) == 1 else 'them'}"
    expected = f"a fact of {giver}; it has {known or 'none (`facts` of a data set: `ddp-train help docs/data.md`)'}"
    fix = typed + (", or text: data=char_text objective=language_modeling" if is_text else "")
    return ConfigError(key=", ".join(unanswered), happened=happened, expected=expected, fix=fix)


def _shown(value: Any) -> str:
    return one_line(text_of(yaml_value(value)), _SHOWN)


def _autos(value: Any, key: str, name: str, owner: ComponentConfig | None) -> Iterator[tuple[str, str, ComponentConfig | None]]:
    """Yield the key of every `auto`, its argument's name ("" for an item of a list), and the component whose argument it is, if any."""
    if isinstance(value, Mapping):
        for name_inside, inner in value.items():
            if name_inside not in DIRECTIVES or name_inside == "_args_":
                yield from _autos(inner, f"{key}.{name_inside}", str(name_inside), value if "_target_" in value else None)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _autos(inner, f"{key}.{index}", "", None)
    elif _is_auto(value):
        yield key, name, owner


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO  # an array would compare its items


def _argument(owner: ComponentConfig | None, name: str) -> tuple[Any, bool]:
    """Return the default of a component's argument (`_NOT_KNOWN`: it has none), and whether its class gives `auto` a meaning."""
    try:
        target = look_up(str((owner or {})["_target_"]))
        parameter = inspect.signature(target).parameters.get(name)
        takes_text = admits_text(hints_of(target).get(name))
    except Exception:  # failed imports and missing signatures are reported elsewhere; an item of a list has no owner
        return _NOT_KNOWN, False
    default = _NOT_KNOWN if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return default, takes_text or _is_auto(default)
