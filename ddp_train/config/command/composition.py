"""How a configuration comes about: which options were chosen and by whom, and which file or word gave each value.

Hydra has composed when this is asked; it reads the same YAML again, in the order of Hydra's own list of defaults.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_train import CONF
from ddp_train.config.hydra_internals import ConfigLoaderImpl, create_config_search_path, get_args_parser
from ddp_train.config.resolve import folder_of
from ddp_train.config.tree import leaves, texts

TYPED = "typed"  # the source of what stands on the command line


class Choice(NamedTuple):
    group: str
    option: str
    source: str  # TYPED, or the file that chose it
    instead_of: str  # what the root's defaults choose; "" where it is the same


class Value(NamedTuple):
    """A value that another source than the chosen option of its own group gave."""

    key: str
    value: Any  # as it was written
    source: str
    instead_of: tuple[tuple[Any, str], ...]  # values and sources that it replaced, the newest first


def parse(arguments: list[str]) -> Namespace:
    """Return the options and `overrides` that Hydra's parser reads in a command line."""
    args: Namespace = get_args_parser().parse_args(arguments)
    return args


def loader_of(args: Namespace, conf: Path = CONF) -> ConfigLoaderImpl:
    """Return the loader of the YAML in the folders that a command line names (as Hydra's parser reads it)."""
    search_path = create_config_search_path(args.config_path or str(conf))
    if args.config_dir is not None:
        search_path.prepend("command-line", f"file://{os.path.abspath(args.config_dir)}", anchor=SearchPathQuery(provider="schema"))
    setup_globals()
    GlobalHydra.instance().clear()
    return ConfigLoaderImpl(search_path)


class Composition:
    """The files of one configuration, which the loader has composed with its section `hydra`."""

    def __init__(self, loader: ConfigLoader, composed: DictConfig) -> None:
        hydra = composed.hydra
        overrides = [*texts(hydra.overrides.hydra), *texts(hydra.overrides.task)]
        defaults = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults
        self._folders = [folder for source in hydra.runtime.config_sources if (folder := folder_of(source.schema, source.path))]
        self._chosen = {group: option for group, option in hydra.runtime.choices.items() if not group.startswith("hydra")}
        self._typed = [word for word in OverridesParser.create().parse_overrides(overrides) if not word.key_or_group.startswith("hydra")]
        self._defaults = [entry for entry in defaults if not (entry.package or "").startswith("hydra") and entry.config_path]
        self._contents = {str(entry.config_path): self._read(str(entry.config_path)) for entry in self._defaults}
        self._root = next(str(entry.config_path) for entry in self._defaults if entry.primary)
        self.choices = self._find_choices()
        self.values = self._find_values()
        self.removed = [word.key_or_group for word in self._typed if word.is_delete()]

    def _find_choices(self) -> list[Choice]:
        """Return the option of each group, in the order of the root's defaults."""
        typed = {word.key_or_group for word in self._typed}
        by_root, by_file = dict[str, str](), dict[str, str]()
        for name, content in self._contents.items():
            entries = [entry for entry in content.get("defaults") or () if isinstance(entry, Mapping)]
            for words, option in ((str(key).split(), option) for entry in entries for key, option in entry.items()):
                group = words[-1].lstrip("/").partition("@")[0]
                if "override" in words:
                    by_file[group] = self._shown(name)
                elif "/" not in name:  # a file of no group
                    by_root.setdefault(group, str(option))
        choices = []
        for group in dict.fromkeys([*by_root, *self._chosen]):
            named = self._chosen.get(group)
            if isinstance(named, str) and self._file(f"{group.partition('@')[0]}/{named}") is None:
                continue  # an optional one, which is not there
            option, default = self._option(group), str(by_root.get(group))
            source = TYPED if group in typed else by_file.get(group, self._shown(self._root))
            choices.append(Choice(group, option, source, default if default != option else ""))
        return choices

    def _option(self, group: str) -> str:
        """Return a group's option, or the list of them where it takes several, of which Hydra keeps no record."""
        if group in self._chosen:
            return str(self._chosen[group])
        fixed = self._contents[self._root].get("defaults") or ()
        options = [path.removeprefix(f"{group}/") for path in self._contents if path.startswith(f"{group}/") and path not in fixed]
        return f"[{','.join(options)}]"

    def _find_values(self) -> list[Value]:
        """Return the values that do not come from the option of their own group."""
        groups = {*self._chosen, *(choice.group for choice in self.choices)}
        history: dict[str, list[tuple[Any, str, bool]]] = {}  # value, source, whether the source is its own group's
        for entry in self._defaults:
            content = {str(key): value for key, value in self._contents[str(entry.config_path)].items() if key not in ("defaults", "hydra")}
            for key, value in leaves(content):
                key = f"{entry.package}.{key}" if entry.package else key
                is_own = entry.config_path in ("config", f"{key.partition('.')[0]}/{entry.config_path.partition('/')[2]}")
                history.setdefault(key, []).append((value, self._shown(entry.config_path), is_own))
        for word in self._typed:
            if word.key_or_group not in groups and not word.is_delete():
                for key, value in leaves({word.key_or_group: word.value()}):
                    history.setdefault(key, []).append((value, TYPED, False))
        return [
            Value(key, past[-1][0], past[-1][1], tuple((value, source) for value, source, _ in reversed(past[:-1])))
            for key, past in history.items()
            if not past[-1][2] and (past[-1][1] == TYPED or len(past) == 1 or past[-1][0] != past[-2][0])
        ]

    def _read(self, name: str) -> dict[Any, Any]:
        file = self._file(name)
        content = None if file is None else OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        return content if isinstance(content, dict) else {}

    def _file(self, name: str) -> Path | None:
        return next((file for folder in self._folders if (file := folder / f"{name}.yaml").is_file()), None)

    def _shown(self, name: str) -> str:
        """Return a file's name as a person would look for it: below `conf` for ours, else from where they stand."""
        if (file := self._file(name)) is None:
            return f"{name}.yaml"
        return f"conf/{file.relative_to(CONF)}" if file.is_relative_to(CONF) else shown(file)


def shown(file: Path) -> str:
    """Return a path as a person would type it: from where they stand when it lies below."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
