"""How a configuration comes about: which options were chosen and by whom, and which file or word gave each value.

Hydra has composed when this is asked; it reads the same YAML again, in the order of Hydra's own list of defaults.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_train.config.check import CONF
from ddp_train.config.hydra_internals import ConfigLoaderImpl, create_config_search_path, get_args_parser
from ddp_train.config.targets.own_target import folder_of
from ddp_train.config.tree import leaves

TYPED = "typed"
"""The source of what stands on the command line."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One group and its option."""

    group: str
    option: str
    source: str  # TYPED, or the file that chose it
    instead_of: str  # what the root's defaults choose; "" where it is the same


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value that another source than the chosen option of its own group gave."""

    key: str
    value: Any  # as it was written
    source: str
    instead_of: tuple[tuple[Any, str], ...]  # values and sources that it replaced, the newest first


def parse(arguments: list[str]) -> Namespace:
    """Return what Hydra's parser reads in a command line: its options, and `overrides`."""
    found: Namespace = get_args_parser().parse_args(arguments)
    return found


def loader_of(args: Namespace, conf: Path = CONF) -> ConfigLoaderImpl:
    """Return what composes, where a command line says that the YAML lies.

    Args:
        args: as Hydra's parser reads them.
    """
    search_path = create_config_search_path(args.config_path or str(conf))
    if args.config_dir is not None:
        search_path.prepend("command-line", f"file://{os.path.abspath(args.config_dir)}", anchor=SearchPathQuery(provider="schema"))
    setup_globals()
    GlobalHydra.instance().clear()
    return ConfigLoaderImpl(search_path)


class Composition:
    """The files of one composed configuration.

    Args:
        loader: what composed it.
        composed: with its node `hydra`.
        overrides: that it was composed from.
    """

    def __init__(self, loader: ConfigLoader, composed: DictConfig, overrides: list[str]) -> None:
        self._folders = [folder for source in composed.hydra.runtime.config_sources if (folder := folder_of(source.schema, source.path))]
        self._chosen: dict[str, Any] = dict(composed.hydra.runtime.choices)
        self._typed = [each for each in OverridesParser.create().parse_overrides(overrides) if not each.key_or_group.startswith("hydra")]
        found = loader.compute_defaults_list(composed.hydra.job.config_name, overrides, RunMode.RUN)
        self._defaults = [each for each in found.defaults if not (each.package or "").startswith("hydra") and each.config_path]
        self._root = next(str(each.config_path) for each in self._defaults if each.primary)
        self._contents: dict[str, dict[Any, Any]] = {}
        self.choices = self._find_choices()
        self.values = self._find_values()

    def _find_choices(self) -> list[Choice]:
        """Return the option of each group, in the order of the root's defaults."""
        typed = {each.key_or_group for each in self._typed}
        by_root: dict[str, str] = {}
        by_file: dict[str, str] = {}
        for each in self._defaults:
            for group, option, is_override in self._choices_in(each.config_path):
                if is_override:
                    by_file[group] = self._shown(each.config_path)
                elif "/" not in each.config_path:  # a file of no group
                    by_root.setdefault(group, option)
        found = []
        for group in [*by_root, *(name for name in self._chosen if name not in by_root and not name.startswith("hydra"))]:
            if self._is_left_out(group):
                continue
            option, default = self._option(group), str(by_root.get(group))
            source = TYPED if group in typed else by_file.get(group, self._shown(self._root))
            found.append(Choice(group=group, option=option, source=source, instead_of=default if default != option else ""))
        return found

    def _option(self, group: str) -> str:
        """Return a group's option, or the list of them where it takes several, of which Hydra keeps no record."""
        if group in self._chosen:
            return str(self._chosen[group])
        fixed = self._read(self._root).get("defaults") or ()
        paths = [path for each in self._defaults if (path := str(each.config_path)).startswith(f"{group}/") and path not in fixed]
        return f"[{','.join(path.removeprefix(f'{group}/') for path in paths)}]"

    def _is_left_out(self, group: str) -> bool:
        """Tell whether an option is named that is not there: an optional one."""
        option = self._chosen.get(group)
        return isinstance(option, str) and self._file(f"{group.partition('@')[0]}/{option}") is None

    def _find_values(self) -> list[Value]:
        """Return the values that do not come from the option of their own group."""
        groups = {*self._chosen, *(each.group for each in self.choices)}
        history: dict[str, list[tuple[Any, str, bool]]] = {}  # value, source, whether the source is its own group's
        for each in self._defaults:
            shown = self._shown(each.config_path)
            for key, value in leaves(self._content(each.config_path)):
                key = f"{each.package}.{key}" if each.package else key
                is_own = each.config_path in ("config", f"{key.partition('.')[0]}/{each.config_path.partition('/')[2]}")
                history.setdefault(key, []).append((value, shown, is_own))
        for override in self._typed:
            if override.key_or_group in groups or override.is_delete():
                continue
            value = override.value()
            for key, leaf in leaves({override.key_or_group: value}):
                history.setdefault(key, []).append((leaf, TYPED, False))
        return [
            Value(
                key=key,
                value=past[-1][0],
                source=past[-1][1],
                instead_of=tuple((value, source) for value, source, _ in reversed(past[:-1])),
            )
            for key, past in history.items()
            if not past[-1][2] and (past[-1][1] == TYPED or len(past) == 1 or past[-1][0] != past[-2][0])
        ]

    def removed(self) -> list[str]:
        """Return the keys that the command line takes out."""
        return [each.key_or_group for each in self._typed if each.is_delete()]

    def _choices_in(self, name: str) -> Iterator[tuple[str, str, bool]]:
        """Yield group, option and whether it replaces another one's choice, for each entry of a file's defaults."""
        for entry in self._read(name).get("defaults") or ():
            if not isinstance(entry, Mapping):
                continue
            for key, option in entry.items():
                words = str(key).split()
                yield words[-1].lstrip("/").partition("@")[0], str(option), "override" in words

    def _content(self, name: str) -> dict[str, Any]:
        return {str(key): value for key, value in self._read(name).items() if key not in ("defaults", "hydra")}

    def _read(self, name: str) -> dict[Any, Any]:
        if name not in self._contents:
            file = self._file(name)
            found = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file is not None else {}
            self._contents[name] = found if isinstance(found, dict) else {}
        return self._contents[name]

    def _file(self, name: str) -> Path | None:
        return next((file for folder in self._folders if (file := folder / f"{name}.yaml").is_file()), None)

    def _shown(self, name: str) -> str:
        """Return a file's name as a person would look for it: below `conf` for ours, else from where they stand."""
        file = self._file(name)
        if file is None:
            return f"{name}.yaml"
        if file.is_relative_to(CONF):
            return f"conf/{file.relative_to(CONF)}"
        return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
