"""Overrides of a saved run's configuration: new values for its keys, and callbacks and metric writers to remove."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train import CONF
from ddp_train.config.command.command_line import join_cut_words, unreadable, without_override
from ddp_train.config.hydra_internals import yaml_loader
from ddp_train.config.schema import NAMED
from ddp_train.config.spelling import unknown_key
from ddp_train.config.tree import dotted_items
from ddp_train.errors import ConfigError, ConfigErrors


def with_overrides(
    saved: Mapping[str, Any], overrides: Sequence[str], *, added: Sequence[str] = (), replaced: Sequence[Mapping[str, Any]] = ()
) -> DictConfig:
    """Return a saved config with overrides applied.

    Args:
        added: overrides of keys that it does not have.
        replaced: the run's config before: a script that resumes a run again repeats its words, and may remove again what is gone.

    Raises ConfigErrors: with each that cannot be read, or that names neither a value, nor a callback or a writer that is to go.
    """
    saved, overrides = _with_strategy(saved, overrides)
    values = dict(dotted_items(saved))
    meant, errors = join_cut_words(overrides)
    errors += without_override(meant, values, {})
    merged = OmegaConf.create({**saved})
    for text in (*meant, *added):
        key, equals, value = text.partition("=")
        section, _, name = key.removeprefix("~").partition(".")
        if text.startswith("~") and section in NAMED and any(name in (tree.get(section) or {}) for tree in (saved, *replaced)):
            merged[section].pop(name, None)
        elif text.startswith("~"):
            there = [f"~{each}.{name}" for each in NAMED for name in saved.get(each) or ()]
            expected = f"only these can be removed from a resumed run: {', '.join(there)}"
            errors.append(ConfigError(key=key[1:], happened="would be removed", expected=expected, fix="leave it out"))
        elif equals and key not in values and text not in added:
            errors.append(unknown_key(key, values, _plain(value)))
        elif equals and isinstance(values.get(key), Mapping):
            errors.append(ConfigError(key=key, happened="is a group", expected="single keys: a run that is resumed keeps its components"))
        elif equals:
            try:
                merged.merge_with_dotlist([text])
            except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
                errors.append(unreadable(text, error))
    if errors:
        raise ConfigErrors(errors)
    return merged


def _plain(text: str) -> Any:
    """Return a value as OmegaConf reads it; one that it cannot read as it was typed."""
    try:
        return yaml.load(text, Loader=yaml_loader())
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text


def _with_strategy(saved: Mapping[str, Any], overrides: Sequence[str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return a saved config with another strategy where one of ours is chosen, and the other overrides: any reads every checkpoint."""
    files = {file.stem: file for file in (CONF / "strategy").glob("*.yaml")}
    chosen = [text for text in overrides if text.startswith("strategy=") and text.partition("=")[2] in files]
    if not chosen:
        return saved, [*overrides]
    strategy = yaml.safe_load(files[chosen[-1].partition("=")[2]].read_text())
    return {**saved, "strategy": strategy}, [text for text in overrides if text not in chosen]
