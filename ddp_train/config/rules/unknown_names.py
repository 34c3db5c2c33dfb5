"""Names that nothing reads, and what was meant by them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from omegaconf import DictConfig, OmegaConf

from ddp_train import redaction
from ddp_train.config.schema import NAMED, ROOT_KEYS, SECTIONS, TARGETS
from ddp_train.config.spelling import CALLED_HERE, nearest, override, removal
from ddp_train.config.tree import leaves, nodes, texts
from ddp_train.errors import ConfigError


def unknown(key: str, valid: Iterable[str], value: Any) -> ConfigError:
    """Say that a key does not exist, and what to type instead: the nearest one, or none."""
    valid, section = list(dict.fromkeys(valid)), key.rpartition(".")[0]
    close = nearest(key, valid)
    expected = "" if close else f"one of {', '.join(other for other in valid if other.rpartition('.')[0] == section)}"
    fix = f"did you mean {override(close, value, was=key)}?" if close else f"remove it: {removal(key, value)}"
    return ConfigError(key=key, happened="is not a key of this configuration", expected=expected, fix=fix)


def unknown_root_names(tree: Mapping[str, Any], hydra: DictConfig | None) -> Iterator[ConfigError]:
    """Find what stands at the top and is not read. Hydra takes such names from a YAML without asking."""
    known = [*SECTIONS, *TARGETS, *NAMED, *ROOT_KEYS]
    valid = [*known, *dict(nodes({name: tree[name] for name in known if name in tree}))]
    typed = texts(hydra.overrides.task) if hydra is not None else []
    options: dict[str, Any] = dict(hydra.runtime.choices) if hydra is not None else {}
    for name, value in tree.items():
        if name in known:
            continue
        option = options.get(name)
        if name == "experiment" and option and isinstance(value, Mapping):
            yield _without_package(str(option), value, hydra)
            continue
        is_secret = any(redaction.spelled_out(key, inner) for key, inner in leaves({name: value}))  # what was typed is not shown again
        meant = [text for text in typed if re.split(r"[.=@]", text.lstrip("+~"))[0] == name]
        advice = [_instead(text, valid) for text in meant if not is_secret]
        if name in CALLED_HERE:
            expected, advice = CALLED_HERE[name], [f"leave it out: {removal(name, value)}"]
        elif any(isinstance(inner, Mapping) and "_target_" in inner for _, inner in nodes({name: value})):
            expected = f"a part of a run: {', '.join([*TARGETS, *(f'{section}.NAME' for section in NAMED)])}; no other is made"
            close = nearest(name, [*TARGETS, *NAMED])
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
        yield ConfigError(key=name, happened="is no part of a configuration, and nothing reads it", expected=expected, fix=" ".join(advice))


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


def targets_in_extra(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    extra = tree.get("extra")
    for key, node in nodes({"extra": extra} if isinstance(extra, Mapping) else {}):
        if isinstance(node, Mapping) and "_target_" in node:
            happened = "has a _target_, and nothing below extra is made"
            expected = f"values; what is made stands below {', '.join([*TARGETS, *NAMED])}"
            yield ConfigError(key=key, happened=happened, expected=expected, fix=removal(key, node))


def unknown_hydra_names(hydra: DictConfig) -> Iterator[ConfigError]:
    """Find names below `hydra.` that Hydra accepts and never reads (facebookresearch/hydra issue 1457)."""
    subdir = hydra.get("output_subdir")
    if subdir is not None and (Path(subdir).name != subdir or not subdir.isprintable()):
        yield ConfigError(key="hydra.output_subdir", happened=f"is {subdir!r}", expected="the name of a folder in the run folder")
    for section, schema in (("", HydraConf), ("run.", RunDir), ("sweep.", SweepDir), ("job.", JobConf)):
        known = [item.name for item in dataclasses.fields(schema)] + ["env"]  # `env` is a group of Hydra's own, without a field
        node = OmegaConf.select(hydra, section.rstrip(".")) if section else hydra
        for name in map(str, node if isinstance(node, DictConfig) else ()):
            if name not in known:
                yield unknown(f"hydra.{section}{name}", [f"hydra.{section}{other}" for other in known], OmegaConf.select(node, name))
