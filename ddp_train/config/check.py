"""The check that finds every problem of a configuration before any process starts.

`check_config` takes what Hydra composed and returns a `RunConfig`: resolved, typed, frozen. All problems come in one `ConfigErrors`.
Every `_target_` is imported and its arguments bound against its signature, so this module imports no torch itself: the targets do.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config import auto, schema
from ddp_train.config.resolve import drop_unused_option_arguments, resolve
from ddp_train.config.rules import check_rules
from ddp_train.config.run_config import PartialConfig, RunConfig, data_config, evaluation_sets
from ddp_train.config.spelling import did_you_mean, instead_of, nearest, override, removal, unknown_key
from ddp_train.config.targets.target import check_object_names, check_target, members_of
from ddp_train.config.tree import ComponentConfig, dotted_items, leaves, texts, value_at
from ddp_train.config.values import missed_range
from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.system import redaction

SECTION_KEYS = [key for name, kind in schema.SECTIONS.items() for key in schema.keys_of(kind, f"{name}.")]
_Section = TypeVar("_Section")


def check_config(config: DictConfig, *, hydra: DictConfig | None = None) -> RunConfig:
    """Resolve and check a composed config; `hydra`: its section of that name, whose names Hydra itself does not check.

    Raises ConfigErrors: with every problem found.
    """
    resolved, unresolved = resolve(config)
    tree, left_out = drop_unused_option_arguments({**{name: {} for name in schema.NAMED}, **resolved}, hydra)
    errors = [*(_unknown_hydra_names(hydra) if hydra is not None else ()), *unresolved]
    errors += _unknown_root_names(tree, hydra)
    errors += _targets_in_extra(tree)
    errors += [plain_secret(key, name) for key, value in leaves(tree) if (name := redaction.variable_for_secret(key, value))]
    merged = {name: merge(kind, tree[name], name) for name, kind in schema.SECTIONS.items() if name in tree}
    sections = {name: section.values for name, section in merged.items()}
    root = merge(schema.RootConfig, {key: tree[key] for key in schema.ROOT_KEYS if key in tree}, "")
    errors += [error for section in (*merged.values(), root) for error in section.errors]
    errors += _check_name(tree)
    errors += _check_targets(tree, reported={error.key for error in errors})
    errors += _check_evaluation_data(tree)
    errors += check_object_names(tree)
    errors += auto.find_unanswerable(tree, schema.COMPONENT_KEYS)
    errors += _missing_sections(tree)
    partial = PartialConfig.of(sections, tree)
    errors += check_rules(partial)
    if errors or root.values is None:
        raise ConfigErrors({str(error): error for error in errors}.values())  # rules may meet the same problem
    batch = partial.batch
    accumulation = None if batch.is_open else batch.grad_accum_steps
    data = tree["data"] if isinstance(tree["data"], dict) else {}
    tree |= {**root.values, **sections, "data": {**data, "eval": data.get("eval")}}
    tree["trainer"] |= {"global_batch_size": batch.global_batch_size, "grad_accum_steps": accumulation}
    return RunConfig.of(tree, batch, left_out)


def _check_targets(tree: Mapping[str, Any], *, reported: set[str]) -> Iterator[ConfigError]:
    """Check what is instantiated. A key is reported once, also where an evaluation set inherits it from `data`."""
    for component_config, key, training_key in _component_configs(tree):
        errors = check_target(component_config, key)
        new_errors = [error for error in errors if not {error.key, error.key.replace(key, training_key, 1)} & reported]
        reported = reported | {error.key for error in new_errors}
        yield from new_errors


def _missing_sections(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    for name in (*schema.SECTIONS, *schema.TARGETS):
        if name not in tree:
            fix = f"+{name}={'default' if name in schema.SECTIONS else 'OPTION'}; `ddp-train --help` lists the options"
            yield ConfigError(key=name, happened="the section is missing", fix=fix)


def check_frozen(tree: dict[str, Any]) -> RunConfig:
    """Check a frozen config again, on this machine: the global batch is kept, the accumulation follows from the number of ranks here."""
    tree = {**tree, "trainer": {**(tree.get("trainer") or {}), "grad_accum_steps": None}}
    return check_config(OmegaConf.create(tree))


def checked_section(composed: DictConfig, kind: type[_Section]) -> _Section:
    """Resolve and check one of our own sections alone: for a sweep's base config, which may lack values of its jobs.

    Raises ConfigErrors: with every problem of the section.
    """
    name = next(name for name, of_section in schema.SECTIONS.items() if of_section is kind)
    section = merge(kind, OmegaConf.to_container(composed[name], resolve=True) if name in composed else {}, name)
    if section.values is None:
        raise ConfigErrors(section.errors)
    return schema.as_dataclass(kind, section.values)


def plain_secret(key: str, name: str) -> ConfigError:
    """Return the error for a value that contains a secret."""
    happened = "contains a secret in plain text; the configuration is saved to disk"
    expected = "the name of an environment variable in its place"
    return ConfigError(key=key, happened=happened, expected=expected, fix=f"export {name}=..., and {key}='{redaction.reference(name)}'")


def check_folder(folder: str, *, key: str) -> list[ConfigError]:
    """Return the error for a folder's name that contains a secret: everybody can see it."""
    name = redaction.variable_for_secret("", folder)
    return [ConfigError(key=key, happened=f"holds the secret {name}", expected="a folder name without a secret")] if name else []


class Merged(NamedTuple):
    values: dict[str, Any] | None  # in the types of their schema; None: one is wrong
    errors: list[ConfigError]


def merge(kind: type, values: Any, at: str) -> Merged:
    """Merge the values at a key, or at the root, into their schema one by one."""
    if not isinstance(values, Mapping):
        return Merged(None, [ConfigError(key=at, happened=f"is {values!r}", expected="a group of keys")])
    errors: list[ConfigError] = []
    prefix = f"{at}." if at else ""
    merged = OmegaConf.structured(schema.as_written(kind))
    OmegaConf.set_readonly(merged, False)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    types = schema.types_of(kind)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            valid = [*(f"{prefix}{field}" for field in fields), *([] if at.startswith("debug") else SECTION_KEYS)]
            errors.append(unknown_key(key, valid, value))
            continue
        if (inner := schema.subsection(fields[name])) is not None:
            value, inner_errors = merge(inner, value, key)
            errors += inner_errors
            if value is None:
                continue
        if float in members_of(types[name]) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # OmegaConf 2.4 warns when it does so itself
        try:
            merged[name] = value
        except OmegaConfBaseException:
            errors.append(ConfigError(key=key, happened=f"is {value!r}", expected=schema.describe(kind, fields[name])))
            continue
        errors += _check_value(key, merged[name], fields[name].metadata, schema.choices_of(kind).get(name, ()))
    for name, item in fields.items():
        if name not in values and OmegaConf.is_missing(merged, name):
            errors.append(ConfigError(key=f"{prefix}{name}", happened="has no value", expected=schema.describe(kind, item)))
    if errors:
        return Merged(None, errors)
    content: Any = OmegaConf.to_container(merged)
    for name, item in fields.items():
        if (inner := item.metadata.get("items")) is not None:
            items = [merge(inner, value, f"{prefix}{name}.{index}") for index, value in enumerate(content[name])]
            content[name] = [item.values for item in items if item.values is not None]
            errors += [error for item in items for error in item.errors]
    return Merged(dict(content), errors)


def _check_value(key: str, value: Any, rule: Mapping[str, Any], choices: tuple[str, ...]) -> Iterator[ConfigError]:
    if value is None:
        return
    if "parse" in rule:
        try:
            rule["parse"](value)
        except ValueError as error:
            yield ConfigError(key=key, happened=f"is {value!r}", expected=str(error))
    if missed := missed_range(value, rule):
        yield ConfigError(key=key, happened=f"is {value}", expected=f"{missed}, or null" if "above" in rule else missed)
    if choices and value not in choices:
        close = nearest(str(value), choices)
        yield ConfigError(key=key, happened=f"is {value!r}", expected=f"one of {', '.join(choices)}", fix=f"{key}={close}" if close else "")


def _check_name(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Keep run folders below `outputs/`: the name becomes a part of their path."""
    name = tree.get("name")
    if "name" in tree and not (isinstance(name, str) and re.fullmatch(r"[^\W_][\w.-]{0,127}", name)):
        yield ConfigError(key="name", happened=f"is {name!r}", expected="letters, digits, '.', '_' and '-', a letter or digit first")


def _check_evaluation_data(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    if not isinstance(value_at(tree, "data.eval"), Mapping | None):
        yield ConfigError(key="data.eval", happened=f"is {tree['data']['eval']!r}", expected="a group of keys, or null")


def _component_configs(tree: Mapping[str, Any]) -> Iterator[tuple[ComponentConfig, str, str]]:
    """Yield the config of each component, with its key; of an evaluation set also with the key that it has in the training data."""
    for name in schema.COMPONENT_KEYS:
        section = value_at(tree, name)
        if not isinstance(section, dict) or name == schema.EVALUATION_SETS:
            continue
        if name == "data":
            section = data_config(tree, name)
        components = {f"{name}.{key}": inner for key, inner in section.items()} if name in schema.COMPONENTS_BY_NAME else {name: section}
        for key, inner in components.items():
            if isinstance(inner, dict) and "_target_" not in inner:
                yield inner, key, key
        for key, inner in dotted_items({name: section}):
            if isinstance(inner, dict) and "_target_" in inner:
                yield inner, key, key
        if name == "data":
            for split in evaluation_sets(tree):
                for key, inner in dotted_items({split: data_config(tree, split)}):
                    if isinstance(inner, dict) and "_target_" in inner:
                        yield inner, key, key.replace(split, "data", 1)


def _unknown_root_names(tree: Mapping[str, Any], hydra: DictConfig | None) -> Iterator[ConfigError]:
    """Find names at the root that nothing reads. Hydra accepts them from a YAML silently."""
    options: dict[str, Any] = dict(hydra.runtime.choices) if hydra is not None else {}
    typed = texts(hydra.overrides.task) if hydra is not None else []
    known = [*schema.SECTIONS, *schema.TARGETS, *schema.NAMED, *schema.ROOT_KEYS]
    valid = [*known, *dict(dotted_items({name: tree[name] for name in known if name in tree}))]
    for name, value in tree.items():
        if name in known:
            continue
        option = options.get(name)
        if name == "experiment" and option and isinstance(value, Mapping):
            yield _without_package(str(option), value, hydra)
            continue
        typed_overrides = [text for text in typed if re.split(r"[.=@]", text.lstrip("+~"))[0] == name]
        if any(isinstance(inner, Mapping) and "_target_" in inner for _, inner in dotted_items({name: value})):
            expected = f"a component in one of {', '.join([*schema.TARGETS, *(f'{named}.NAME' for named in schema.NAMED)])}"
            close = nearest(name, [*schema.TARGETS, *schema.NAMED])
            fix = f"did you mean {close}?" if close else f"leave it out: {removal(name, value)}"
        else:
            expected = f"one of {', '.join(known)}; values of your own, for ${{extra.NAME}}, go below extra"
            fix = _fix_of_value(name, value, valid, option=option, typed_overrides=typed_overrides)
        yield ConfigError(key=name, happened="is not a key of the configuration, and nothing reads it", expected=expected, fix=fix)


def _fix_of_value(name: str, value: Any, valid: Sequence[str], *, option: Any, typed_overrides: Sequence[str]) -> str:
    """Return the fix for a value at the root that nothing reads: from what was typed, or a YAML."""
    if option and typed_overrides:
        return override(f"{name}@extra.{name}", option, sign="+")
    is_secret = any(redaction.variable_for_secret(key, inner) for key, inner in leaves({name: value}))
    if typed_overrides and not is_secret:  # a secret is not printed again
        return " ".join(_instead(text, valid) for text in typed_overrides)
    close = nearest(name, valid)
    return f"did you mean {close}?" if close else f"in your YAML, put it below extra; {removal(name, value)} leaves it out"


def _instead(typed: str, valid: Iterable[str]) -> str:
    """Return the override to type instead of one whose name nothing reads."""
    key, equals, value = typed.lstrip("+").partition("=")
    if here := instead_of(key, value):
        return did_you_mean(here)
    close = nearest(key, valid)
    if close in (*schema.SECTIONS, *schema.TARGETS) and not value.isidentifier():
        close = ""  # a group's value is the name of an option
    return f"did you mean {shlex.quote(close + equals + value)}?" if close else shlex.quote(f"+extra.{key}{equals}{value}")


def _without_package(option: str, misplaced: Mapping[str, Any], hydra: DictConfig | None) -> ConfigError:
    """Return the error for an experiment without effect: without that first line Hydra puts its keys below its group's name."""
    folders = [source.path for source in hydra.runtime.config_sources if source.schema == "file"] if hydra is not None else []
    files = [path for folder in folders if (path := Path(folder) / "experiment" / f"{option}.yaml").exists()]
    file = str(files[0]) if files else f"experiment/{option}.yaml"
    keys = ", ".join(map(str, misplaced))
    happened = f"{file} lacks the line `# @package _global_`: its keys landed below `experiment.`, where nothing reads them ({keys})"
    fix = f"sed -i '1i # @package _global_' {shlex.quote(file)}"
    return ConfigError(key="experiment", happened=happened, expected="`# @package _global_` as its first line", fix=fix)


def _targets_in_extra(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    for key, value in dotted_items({"extra": tree["extra"]} if isinstance(tree.get("extra"), Mapping) else {}):
        if isinstance(value, Mapping) and "_target_" in value:
            happened = "has a _target_, and nothing below extra is instantiated"
            expected = f"plain values; components go below {', '.join([*schema.TARGETS, *schema.NAMED])}"
            yield ConfigError(key=key, happened=happened, expected=expected, fix=removal(key, value))


def _unknown_hydra_names(hydra: DictConfig) -> Iterator[ConfigError]:
    """Find names below `hydra.` that Hydra accepts and never reads (facebookresearch/hydra issue 1457)."""
    subdir = hydra.get("output_subdir")
    if subdir is not None and (Path(subdir).name != subdir or not subdir.isprintable()):
        yield ConfigError(key="hydra.output_subdir", happened=f"is {subdir!r}", expected="the name of a folder in the run folder")
    for prefix, kind in (("", HydraConf), ("run.", RunDir), ("sweep.", SweepDir), ("job.", JobConf)):
        known = [item.name for item in dataclasses.fields(kind)] + ["env"]  # `env` is a group of Hydra's own, without a field
        section = OmegaConf.select(hydra, prefix.rstrip(".")) if prefix else hydra
        for name in map(str, section if isinstance(section, DictConfig) else ()):
            if name not in known:
                yield unknown_key(f"hydra.{prefix}{name}", [f"hydra.{prefix}{other}" for other in known], OmegaConf.select(section, name))
