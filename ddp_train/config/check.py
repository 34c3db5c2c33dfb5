"""The check that finds every problem of a configuration before any process starts.

`check` takes what Hydra composed and returns a `RunConfig`: resolved, typed, frozen. All problems come in one `ConfigErrors`.
Every `_target_` is imported and its arguments bound against its signature, so this module imports no torch itself: the targets do.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_train import FOLDER, redaction
from ddp_train.config import allowed_targets, auto, limits
from ddp_train.config.batch_sizes import BatchSizes, derive_batch_sizes
from ddp_train.config.command_line import whole
from ddp_train.config.rules import (
    check_bad_numbers,
    check_checkpoints,
    check_device,
    check_evaluation,
    check_faults,
    check_machines,
    check_reading,
    check_sampling,
    check_steps,
    check_strategy,
)
from ddp_train.config.schema import LOADER_KEYS, ROOT_KEYS, SECTIONS, TARGETS, FaultConfig, LoaderConfig, RootConfig
from ddp_train.config.spelling import CALLED_HERE, nearest, override, removal
from ddp_train.config.target import check_target
from ddp_train.config.tree import keys, leaves, nodes, sha256, texts
from ddp_train.errors import ConfigError

CONF = next(path for path in (FOLDER / "conf", FOLDER.parent / "conf") if path.is_dir())
"""The config groups: inside the installed package, or at the top of a checkout."""


class ConfigErrors(Exception):
    """Every problem of a configuration, to be shown together; exit code 2."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = list(errors)
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.text(has_begun=False)

    def text(self, *, has_begun: bool) -> str:
        """Return what is shown.

        Args:
            has_begun: jobs before this one have run.
        """
        count = len(self.errors)
        title = "1 problem in the configuration" if count == 1 else f"{count} problems in the configuration"
        started = "no other job was started" if has_begun else "nothing was started"
        return "\n\n".join([f"{title}; {started}.", *(str(error) for error in self.errors)])


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run's configuration: plain containers, everything resolved; what each rank receives."""

    tree: dict[str, Any]
    batch: BatchSizes

    def yaml(self, answers: Mapping[str, Any] | None = None) -> str:
        """Return config.yaml.

        Args:
            answers: what its `auto`s have come to, by their keys; the file has them in their places, and lists the keys under `auto`.
        """
        if not answers:
            return self._yaml
        return OmegaConf.to_yaml(OmegaConf.create({**auto.put(self.tree, "", answers), ANSWERED: list(answers)}))

    @cached_property
    def _yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.tree))

    def hash(self) -> str:
        """Return the sha256 of what was composed: the same on all ranks and in all attempts, whatever the `auto`s come to."""
        return sha256(self.yaml())


ANSWERED = "auto"
"""Where config.yaml lists the keys that were `auto`."""


def check(config: DictConfig, *, hydra: DictConfig | None = None) -> RunConfig:
    """Resolve and check a composed config.

    Args:
        config: the job's config, without the `hydra` node.
        hydra: the `hydra` node, whose names Hydra itself does not check.

    Raises:
        ConfigErrors: with every problem found.
    """
    errors: list[ConfigError] = []
    limits.check_interpolations(config)
    if hydra is not None:
        errors += _unknown_hydra_names(hydra)
    with _secrets_sealed():
        tree = {"metrics": {}, **_unmarked(_resolve(config, "", errors))}
    errors += _unknown_root_names(tree, hydra)
    errors += _targets_in_extra(tree)
    errors += [_spelled_out(key, name) for key, value in leaves(tree) if (name := redaction.spelled_out(key, value))]
    sections = {name: _typed(schema, tree.get(name) or {}, name, errors) for name, schema in SECTIONS.items()}
    data: dict[str, Any] = tree["data"] if isinstance(tree.get("data"), dict) else {}
    sections["data"] = _typed(LoaderConfig, {key: data[key] for key in LOADER_KEYS if key in data}, "data", errors)
    faults = sections["debug"].get("faults", [])
    sections["debug"]["faults"] = [_typed(FaultConfig, fault, f"debug.faults.{place}", errors) for place, fault in enumerate(faults)]
    root = _typed(RootConfig, {key: tree[key] for key in ROOT_KEYS if key in tree}, "", errors)
    errors += _check_name(root.get("name", ""))
    allowed = root.get("allowed_targets") or []
    errors += allowed_targets.check_allowed(allowed)
    for node, key in _target_nodes(tree):
        found = check_target(node, key, allowed=allowed)
        errors += _of_evaluation(found, node, data.get("eval") or {}) if key == "data.eval" else found
    errors += auto.check({**tree, "data": {key: value for key, value in data.items() if key not in LOADER_KEYS or key == "eval"}}, _MADE)
    errors += [_missing_section(name) for name in TARGETS if name not in tree]
    batch = None
    if not any(_concerns_batch(error.key) for error in errors):
        batch, batch_errors = derive_batch_sizes(sections["trainer"], sections["data"], sections["cluster"])
        errors += batch_errors
        errors += check_reading(sections["data"])
        errors += check_sampling(sections["data"])
        errors += check_steps(tree, sections["trainer"])
        errors += check_bad_numbers(sections["trainer"], sections["checkpoint"], sections["data"])
        errors += check_strategy(tree, batch)
        errors += check_evaluation(sections["evaluate"], sections["data"])
        errors += check_checkpoints(sections["checkpoint"], sections["trainer"], sections["data"])
        errors += check_device(tree, sections["cluster"])
        errors += check_machines(sections["cluster"])
        errors += check_faults(sections["debug"]["faults"], sections["data"], batch)
    if errors or batch is None:
        raise ConfigErrors(errors)
    tree.update(root)
    for name, values in sections.items():
        tree[name] = {**(tree.get(name) or {}), **values}
    tree["trainer"] |= {"global_batch_size": batch.global_batch_size, "grad_accum_steps": batch.grad_accum_steps}
    return RunConfig(tree=tree, batch=batch)


def load(tree: dict[str, Any]) -> RunConfig:
    """Check a frozen config again, on this machine: the global batch is kept, the accumulation follows the number of ranks here."""
    tree = {**tree, "trainer": {**(tree.get("trainer") or {}), "grad_accum_steps": None}}
    return check(OmegaConf.create(tree))


def options(hydra: DictConfig) -> list[str]:
    """Return what a command line needs, beside its overrides, to find the same YAML again."""
    here = Path.cwd()
    sources = hydra.runtime.config_sources
    added = [Path(source.path) for source in sources if source.provider == "command-line"]
    instead = [source.path for source in sources if source.provider == "main" and Path(source.path) != CONF]
    found = [f"--config-path={path}" for path in instead]  # whole: Hydra takes a relative one for a module of ours
    found += [f"--config-dir={folder.relative_to(here) if folder.is_relative_to(here) else folder}" for folder in added]
    found += [f"--config-name={hydra.job.config_name}"] if hydra.job.config_name not in (None, "config") else []
    return found + [text for text in texts(hydra.overrides.hydra) if text.lstrip("+").startswith("hydra.searchpath=")]


def section(composed: DictConfig, name: str) -> dict[str, Any]:
    """Resolve and check one of our own sections alone: of a sweep's base config, which may lack what its jobs will have.

    Raises:
        ConfigErrors: with every problem of the section.
    """
    errors: list[ConfigError] = []
    typed = _typed(SECTIONS[name], OmegaConf.to_container(composed[name], resolve=True) if name in composed else {}, name, errors)
    if errors:
        raise ConfigErrors(errors)
    return typed


_MADE = (*TARGETS, "metrics")


def _resolve(node: DictConfig, prefix: str, errors: list[ConfigError]) -> dict[str, Any]:
    """Turn a composed config into plain containers, collecting every value that cannot be had."""
    plain: dict[str, Any] = {}
    for name in node:
        key, path = str(name), f"{prefix}{name!s}"  # text, as JSON has it on its way to the other ranks
        if OmegaConf.is_missing(node, name):
            errors.append(ConfigError(key=path, happened="has no value yet (???)", fix=f"{path}=VALUE"))
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig):
                plain[key] = _resolve(value, f"{path}.", errors)
            else:
                plain[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            errors.append(ConfigError(key=path, happened=str(error).splitlines()[0], expected="an interpolation that resolves"))
    return plain


@contextmanager
def _secrets_sealed() -> Iterator[None]:
    """Let a secret's `${oc.env:NAME}` stand: the value is for the rank that needs it, not for a file, another machine or a hash."""

    def env(name: str, *default: Any, _node_: Any) -> Any:
        is_secret = redaction.is_secret_reference(name) or redaction.is_secret_key(str(_node_._get_full_key(None)))
        return f"{_MARK}{name}{_MARK}" if name in os.environ and is_secret else oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


_MARK = "\0"  # around the name of a variable; what looked like an interpolation would be resolved again


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(f"{_MARK}(.*?){_MARK}", lambda found: redaction.reference(found[1]), value)
    if isinstance(value, dict):
        return {name: _unmarked(inner) for name, inner in value.items()}
    return [_unmarked(inner) for inner in value] if isinstance(value, list) else value


def _spelled_out(key: str, name: str) -> ConfigError:
    return ConfigError(
        key=key,
        happened="spells a secret out, and a configuration is written down",
        expected="the name of an environment variable in its place",
        fix=f"export {name}=..., and {key}='{redaction.reference(name)}'",
    )


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that hold a secret, or more than a config may, before anybody parses or shows them.

    Raises:
        ConfigErrors: with every secret.
    """
    limits.check_overrides(overrides)
    errors = []
    for text in dict.fromkeys([*overrides, *whole(overrides)[0]]):  # as they came, and as they were meant
        key, equals, value = text.partition("=")
        key, value = (key.lstrip("+~-").strip(), value.strip("'\" ")) if equals else ("", text)
        name = redaction.spelled_out(key, value)
        errors += [_spelled_out(key, name)] if name else []
    if errors:
        raise ConfigErrors(errors)


def _typed(schema: type, values: Any, section: str, errors: list[ConfigError]) -> dict[str, Any]:
    """Merge values into a schema one by one, so that every wrong one is found; return all fields, typed."""
    prefix = f"{section}." if section else ""
    if not isinstance(values, Mapping):
        errors.append(ConfigError(key=section, happened=f"is {values!r}", expected="a group of keys"))
        return {}
    typed = OmegaConf.structured(schema)
    fields = {item.name: item for item in dataclasses.fields(schema)}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            errors.append(unknown(key, [f"{prefix}{other}" for other in fields], value))
            continue
        try:
            typed[name] = value
        except OmegaConfBaseException:
            kind = str(fields[name].type).replace(" | None", " or null")
            errors.append(ConfigError(key=key, happened=f"is {value!r}", expected=f"a value of type {kind}"))
            continue
        errors += _check_range(key, typed[name], fields[name].metadata)
    plain = OmegaConf.to_container(typed)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_range(key: str, value: Any, rule: Mapping[str, Any]) -> list[ConfigError]:
    if value is None:
        return []
    if "parse" in rule:
        try:
            rule["parse"](value)
        except ValueError as error:
            return [ConfigError(key=key, happened=f"is {value!r}", expected=str(error))]
    if "min" in rule and value < rule["min"]:
        return [ConfigError(key=key, happened=f"is {value}", expected=f"at least {rule['min']}")]
    if "above" in rule and not value > rule["above"]:
        return [ConfigError(key=key, happened=f"is {value}", expected=f"more than {rule['above']}, or null")]
    if "one_of" in rule and value not in rule["one_of"]:
        close = nearest(str(value), rule["one_of"])
        return [
            ConfigError(
                key=key, happened=f"is {value!r}", expected=f"one of {', '.join(rule['one_of'])}", fix=f"{key}={close}" if close else ""
            )
        ]
    return []


def unknown(key: str, valid: Iterable[str], value: Any) -> ConfigError:
    """Say that nobody knows a key, and what to type instead: the nearest one, or none."""
    valid, section = list(valid), key.rpartition(".")[0]
    close = nearest(key, valid)
    return ConfigError(
        key=key,
        happened="is not a key of this configuration",
        expected="" if close else f"one of {', '.join(other for other in valid if other.rpartition('.')[0] == section)}",
        fix=f"did you mean {override(close, value, was=key)}?" if close else f"remove it: {removal(key, value)}",
    )


def _unknown_root_names(tree: Mapping[str, Any], hydra: DictConfig | None) -> list[ConfigError]:
    """Find what stands at the top and nobody reads. A YAML adds such names without Hydra's asking."""
    known = [*SECTIONS, *TARGETS, "metrics", *ROOT_KEYS]
    valid = [*known, *keys({name: tree[name] for name in known if name in tree})]
    typed = texts(hydra.overrides.task) if hydra is not None else []
    options: dict[str, Any] = dict(hydra.runtime.choices) if hydra is not None else {}
    errors = []
    for name, value in tree.items():
        if name in known:
            continue
        option = options.get(name)
        if name == "experiment" and option and isinstance(value, Mapping):
            errors.append(_without_package(str(option), value, hydra))
            continue
        is_secret = any(redaction.spelled_out(key, inner) for key, inner in leaves({name: value}))  # what was typed is not shown again
        meant = [text for text in typed if re.split(r"[.=@]", text.lstrip("+~"))[0] == name]
        advice = [_instead(text, valid) for text in meant if not is_secret]
        if name in CALLED_HERE:
            expected, advice = CALLED_HERE[name], [f"leave it out: {removal(name, value)}"]
        elif any(isinstance(inner, Mapping) and "_target_" in inner for _, inner in nodes({name: value})):
            expected = f"a part of a run: {', '.join(TARGETS)} or metrics.NAME; nobody makes another one"
            close = nearest(name, known)
            advice = [f"did you mean {close}?" if close else f"leave it out: {removal(name, value)}"]
        else:
            expected = f"one of {', '.join(known)}; values of your own, for ${{extra.NAME}}, stand below extra"
            if option and not meant:  # an experiment's choice, beside which a second one would stand
                advice = [f"in the defaults of your YAML, write /{name}@extra.{name}: {option}"]
            elif option:
                advice = [override(f"{name}@extra.{name}", option, sign="+")]
            elif not advice:
                close = nearest(name, valid)
                advice = [f"did you mean {close}?" if close else f"in your YAML, put it below extra; {removal(name, value)} leaves it out"]
        errors.append(
            ConfigError(key=name, happened="is no part of a configuration, and nothing reads it", expected=expected, fix=" ".join(advice))
        )
    return errors


def _instead(typed: str, valid: Iterable[str]) -> str:
    """Return what to type for an override of a name that nothing reads."""
    key, equals, value = typed.lstrip("+").partition("=")
    close = nearest(key, valid)
    if close in (*SECTIONS, *TARGETS) and not value.isidentifier():
        close = ""  # what a group is set to is the name of an option
    return f"did you mean {shlex.quote(close + equals + value)}?" if close else shlex.quote(f"+extra.{key}{equals}{value}")


def _without_package(option: str, landed: Mapping[str, Any], hydra: DictConfig | None) -> ConfigError:
    """Say why an experiment has no effect: without its first line Hydra puts what it holds below the name of its group."""
    folders = [source.path for source in hydra.runtime.config_sources if source.schema == "file"] if hydra is not None else []
    files = [path for folder in folders if (path := Path(folder) / "experiment" / f"{option}.yaml").exists()]
    file = str(files[0]) if files else f"experiment/{option}.yaml"
    return ConfigError(
        key="experiment",
        happened=f"{file} lacks the line `# @package _global_`: its keys landed below `experiment.`, where nothing reads them"
        f" ({', '.join(map(str, landed))})",
        expected="`# @package _global_` as its first line",
        fix=f"sed -i '1i # @package _global_' {shlex.quote(file)}",
    )


def _targets_in_extra(tree: Mapping[str, Any]) -> list[ConfigError]:
    extra = tree.get("extra")
    return [
        ConfigError(
            key=key,
            happened="has a _target_, and nothing below extra is made",
            expected=f"values; what is made stands below {', '.join(TARGETS)} or metrics",
            fix=removal(key, node),
        )
        for key, node in nodes({"extra": extra} if isinstance(extra, Mapping) else {})
        if isinstance(node, Mapping) and "_target_" in node
    ]


def _unknown_hydra_names(hydra: DictConfig) -> list[ConfigError]:
    """Find names below `hydra.` that Hydra accepts and never reads (facebookresearch/hydra issue 1457)."""
    errors = []
    subdir = hydra.get("output_subdir")
    if subdir is not None and (Path(subdir).name != subdir or not subdir.isprintable()):
        errors.append(ConfigError(key="hydra.output_subdir", happened=f"is {subdir!r}", expected="the name of a folder in the run folder"))
    for section, schema in (("", HydraConf), ("run.", RunDir), ("sweep.", SweepDir), ("job.", JobConf)):
        known = [item.name for item in dataclasses.fields(schema)] + ["env"]  # `env` is a group of Hydra's own, without a field
        node = OmegaConf.select(hydra, section.rstrip(".")) if section else hydra
        given = [str(name) for name in node] if isinstance(node, DictConfig) else []
        errors += [
            unknown(f"hydra.{section}{name}", [f"hydra.{section}{other}" for other in known], OmegaConf.select(node, name))
            for name in given
            if name not in known
        ]
    return errors


def _missing_section(name: str) -> ConfigError:
    return ConfigError(key=name, happened="the section is missing", fix=f"{name}=OPTION; `ddp-train --help` lists the options")


def _check_name(name: Any) -> list[ConfigError]:
    """Keep run folders below `outputs/`: the name becomes a part of their path."""
    if isinstance(name, str) and name and name[0].isalnum() and all(char.isalnum() or char in "._-" for char in name) and len(name) <= 128:
        return []
    return [ConfigError(key="name", happened=f"is {name!r}", expected="letters, digits, '.', '_' and '-', a letter or digit first")]


def _target_nodes(tree: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every node that is instantiated, with its key; the data's evaluation split as the second node that it is."""
    for name in (*TARGETS, "metrics"):
        node = tree.get(name)
        if not isinstance(node, dict):
            continue
        if name == "data":
            changes = node.get("eval") or {}
            node = {key: value for key, value in node.items() if key not in LOADER_KEYS}
            if changes and isinstance(changes, dict) and "_target_" in node:
                yield {**node, **changes}, "data.eval"
        if name != "metrics" and "_target_" not in node:
            yield {**node, "_target_": None}, name
        if name == "metrics":
            yield from (
                (dict(writer), f"metrics.{key}") for key, writer in node.items() if isinstance(writer, dict) and "_target_" not in writer
            )
        for key, inner in nodes({name: node}):
            if isinstance(inner, dict) and "_target_" in inner:
                yield inner, key


def _of_evaluation(errors: Iterable[ConfigError], node: Mapping[str, Any], changes: Mapping[str, Any]) -> list[ConfigError]:
    """Keep what is wrong with the evaluation split alone. What it takes over from `data` is told of `data`, where it can be changed."""
    kept = []
    for error in errors:
        name = error.key.removeprefix("data.eval.").partition(".")[0]
        if name not in changes and "_target_" not in changes:
            continue
        if name in node and name not in changes:
            error.key = error.key.replace("data.eval.", "data.", 1)
            error.happened += ", and data.eval takes it over from data"
            error.fix = f"remove it: {removal(f'data.{name}', node[name])}"
        kept.append(error)
    return kept


def _concerns_batch(key: str) -> bool:
    return key.split(".")[0] in ("trainer", "cluster") or key.removeprefix("data.") in LOADER_KEYS
