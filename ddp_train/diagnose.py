"""Find every mistake of a command line that Hydra refuses, not only the first one that it met.

Runs only after Hydra raised. Each override is looked at alone, then the right ones are composed and checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train import config
from ddp_train.errors import ConfigError
from ddp_train.spelling import nearest


def explain(error: Exception, arguments: list[str], conf: Path) -> str:
    """Return what to show for an exception that Hydra raised: all problems of the command line, or else Hydra's own words."""
    try:
        found = _find_all(arguments, conf)
    except Exception:  # then Hydra's own words must do
        found = []
    if found:
        return str(config.ConfigErrors(found))
    said = [str(error).strip()]
    if error.__cause__ is not None and str(error.__cause__) not in said[0]:
        said.append(str(error.__cause__).strip())
    return str(config.ConfigErrors([ConfigError(happened="\n".join(said))]))


def refuse_unknown(overrides: list[str], saved: Mapping[str, Any]) -> None:
    """Raise for an override that does not name a key of a saved config.

    Raises:
        ConfigErrors: with every such override.
    """
    valid = config.keys(saved)
    errors = []
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            errors.append(ConfigError(happened=f"{text!r} is no override", expected="key=value"))
        elif key not in valid:
            errors.append(_unknown(key, valid))
        elif isinstance(dict(config.nodes(saved))[key], Mapping):
            errors.append(ConfigError(key=key, happened="is a group", expected="single keys: a run that is resumed keeps its components"))
    if errors:
        raise config.ConfigErrors(errors)


def _find_all(arguments: list[str], conf: Path) -> list[ConfigError]:
    args = get_args_parser().parse_args(arguments)
    search_path = create_config_search_path(str(conf))
    if args.config_dir is not None:
        search_path.prepend("command-line", f"file://{os.path.abspath(args.config_dir)}", anchor=SearchPathQuery(provider="schema"))
    setup_globals()
    GlobalHydra.instance().clear()
    loader = ConfigLoaderImpl(search_path)

    def compose(overrides: list[str]) -> DictConfig:
        return loader.load_configuration(args.config_name or "config", overrides, run_mode=RunMode.RUN)

    parser = OverridesParser.create(loader)
    errors: list[ConfigError] = []
    choices: list[str] = []
    values: list[Override] = []
    for text in args.overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            errors.append(ConfigError(happened=str(error).splitlines()[0], expected="key=value, group=option, +key=value or ~key"))
            continue
        if loader.get_group_options(override.key_or_group) and not override.is_delete():
            wrong = _wrong_options(override, loader.get_group_options(override.key_or_group))
            errors += wrong
            if not wrong:
                choices.append(_one(override))
        else:
            values.append(override)
    base = compose(choices)
    plain = OmegaConf.to_container(base, resolve=False)
    assert isinstance(plain, dict)
    valid = config.keys({str(key): value for key, value in plain.items()})
    groups = loader.get_group_options("", results_filter=None)
    good: list[str] = []
    for override in values:
        if not override.is_add() and override.key_or_group not in valid:
            errors.append(_unknown(override.key_or_group, [*valid, *groups]))
        else:
            good.append(_one(override))
    try:
        composed = compose([*choices, *good])
        hydra_node = composed.pop("hydra") if _unlock(composed) else None
        config.check(composed, hydra=hydra_node)
    except config.ConfigErrors as error:
        errors += error.errors
    except (HydraException, OmegaConfBaseException) as error:
        if not errors:
            raise
        del error  # a consequence of what was found above, as a rule
    return errors


def _unlock(composed: DictConfig) -> bool:
    OmegaConf.set_readonly(composed, False)
    OmegaConf.set_struct(composed, False)
    return True


def _wrong_options(override: Override, options: list[str]) -> list[ConfigError]:
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    chosen = [str(choice) for choice in values]
    errors = []
    for choice in chosen:
        if choice in options or choice in ("null", "None"):
            continue
        close = nearest(choice, options)
        errors.append(
            ConfigError(
                key=override.key_or_group,
                happened=f"has no option {choice!r}",
                expected=f"one of {', '.join(options)}",
                fix=f"did you mean {override.key_or_group}={close}?" if close else "",
            )
        )
    return errors


def _unknown(key: str, valid: list[str]) -> ConfigError:
    close = nearest(key, valid)
    return ConfigError(
        key=key,
        happened="is not a key of this configuration",
        fix=f"did you mean {close}?" if close else f"+{key}=VALUE adds a new key",
    )


def _one(override: Override) -> str:
    """Return the override as text, a sweep as its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    first: Any = next(iter(override.sweep_string_iterator()))
    return f"{override.get_key_element()}={first}"
