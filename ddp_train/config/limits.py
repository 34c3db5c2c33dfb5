"""What is looked at before Hydra and OmegaConf act on it: the size of a YAML, where interpolations lead, and what the `hydra` node starts.

OmegaConf copies whatever a YAML repeats by alias, and resolves an interpolation each time that it is used: 250 bytes can cost half a minute
and half a gigabyte. Hydra makes its callbacks and loggers before anybody sees the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ddp_train.config import hydra_internals, refused_targets
from ddp_train.config.hydra_internals import ConfigLoaderImpl
from ddp_train.config.target import locate
from ddp_train.errors import ConfigError
from ddp_train.system.module_names import module_name

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000

_HYDRA = (
    hydra_internals.CORE_PLUGINS,
    "hydra.experimental.callbacks",
    "hydra_plugins",
    "optuna.samplers",
    f"{module_name('ddp_train.cli.compose')}.Checked",
)
"""What the `hydra` node may name beside components and the user's own classes."""

_HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
_REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|deprecated|create|dict\.keys|dict\.values):)?\s*(\.*)([\w.\[\]-]*)")


def install() -> None:
    """Make OmegaConf's YAML loader and Hydra's composition look first. Once in a process; again does nothing."""
    if not hasattr(hydra_internals.yaml_loader(), "is_limited"):
        loader = _limited(hydra_internals.yaml_loader())
        for module in hydra_internals.yaml_loader_modules():
            vars(module)["get_yaml_loader"] = loader
        compose = getattr(ConfigLoaderImpl, hydra_internals.COMPOSE)

        def load_configuration(self: ConfigLoaderImpl, *arguments: Any, **named: Any) -> DictConfig:
            composed: DictConfig = compose(self, *arguments, **named)
            check_interpolations(composed)
            check_hydra(composed)
            return composed

        setattr(ConfigLoaderImpl, hydra_internals.COMPOSE, load_configuration)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that Hydra's parser would choke on.

    Raises:
        ConfigError: naming the first one.
    """
    for text in overrides:
        depth = deepest = 0
        for char in text:
            depth += (char in "[{(") - (char in "]})")
            deepest = max(deepest, depth)
        if len(text) > MAX_CHARACTERS or deepest > MAX_DEPTH:
            _refuse(text.partition("=")[0][:80], f"has {len(text):,} characters, {deepest} levels deep")


def check_interpolations(config: DictConfig) -> None:
    """Count what resolving would produce, without resolving.

    Raises:
        ConfigError: more than `MAX_NODES` values, or a circle.
    """
    plain = OmegaConf.to_container(config, resolve=False)
    costs: dict[tuple[str, ...], int] = {}

    def cost(path: tuple[str, ...], value: Any, under: tuple[tuple[str, ...], ...]) -> int:
        if path in costs:
            return costs[path]
        if path in under or len(under) > 2 * MAX_DEPTH:
            return 1  # a circle, of which OmegaConf says more
        inside = (*under, path)
        total = 1
        if isinstance(value, str) and "${" in value:
            for dots, name in _REFERENCE.findall(value):
                base = path[: len(path) - len(dots)] if dots else ()
                target = (*base, *(part for part in re.split(r"[.\[\]]+", name) if part))
                total += cost(target, _select(plain, target), inside)
        else:
            total += sum(cost((*path, key), item, inside) for key, item in _items(value))
        costs[path] = total
        if total > MAX_NODES:
            _refuse(".".join(path), f"resolves to more than {MAX_NODES:,} values")
        return total

    cost((), plain, ())


def check_hydra(composed: DictConfig) -> None:
    """Refuse what Hydra itself would call on behalf of the `hydra` node: callbacks, a sweeper's parts, factories of loggers.

    Raises:
        ConfigError: naming the first one.
    """
    node = OmegaConf.to_container(composed.hydra, resolve=False) if "hydra" in composed else {}
    for path, value in _leaves(node, ("hydra",)):
        if not isinstance(value, str):
            continue
        key, name = ".".join(path), path[-1]
        reason = ""
        is_logging = len(path) > 2 and path[1].endswith("_logging")
        if name == "_target_":
            reason = _refusal(value, _HYDRA)
        elif is_logging and (
            name == "()" or (value.startswith(("ext://", "cfg://")) and value not in ("ext://sys.stdout", "ext://sys.stderr"))
        ):
            reason = "would call or fetch something by its name"
        elif is_logging and name == "class" and value not in _HANDLERS:
            reason = _refusal(value, ("rich.logging", "colorlog"))
        if reason:
            raise ConfigError(key=key, happened=f"{value} {reason}", expected="a class of Hydra's, or of your own")


def _refusal(path: str, allowed: Sequence[str]) -> str:
    try:
        return refused_targets.refuse(path, locate(path), allowed)
    except ImportError:
        return ""  # Hydra says so


def _limited(loader: Any) -> Any:
    class Limited(loader):  # type: ignore[misc]
        """OmegaConf's loader, which refuses what is too large, too deep or repeats itself too often."""

        is_limited = True

        def __init__(self, stream: Any) -> None:
            text = stream if isinstance(stream, (str, bytes)) else stream.read(MAX_CHARACTERS + 1)
            self._where = str(getattr(stream, "name", "YAML"))
            if len(text) > MAX_CHARACTERS:
                _refuse("", f"{self._where} has more than {MAX_CHARACTERS:,} characters")
            super().__init__(text)
            self.name = self._where

        def get_single_node(self) -> Any:
            try:
                node = super().get_single_node()
                values, levels = (0, 0) if node is None else _size(node, {})
            except RecursionError:
                values, levels = 0, MAX_DEPTH + 1
            if levels > MAX_DEPTH:
                _refuse("", f"{self._where} is nested more than {MAX_DEPTH} levels deep")
            if values > MAX_NODES:
                _refuse("", f"{self._where} has more than {MAX_NODES:,} values when its aliases are written out")
            return node

    return lambda **its_own_limits: Limited  # OmegaConf 2.4 has some


def _size(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values and levels a YAML has with every alias written out."""
    if id(node) not in known:
        known[id(node)] = MAX_NODES, 0  # an alias of what it stands in
        items = [] if isinstance(node, yaml.ScalarNode) else node.value  # of a mapping: pairs
        inner = [_size(part, known) for item in items for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(values for values, _ in inner), 1 + max((levels for _, levels in inner), default=0)
    return known[id(node)]


def _refuse(key: str, happened: str) -> None:
    raise ConfigError(
        key=key,
        happened=happened,
        expected=f"at most {MAX_CHARACTERS:,} characters, {MAX_DEPTH} levels and {MAX_NODES:,} values",
        fix="put large data into a file of its own, and its path into the configuration",
    )


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        yield from ((str(place), item) for place, item in enumerate(value))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = list(_items(value))
    if not inner:
        yield path, value
    for key, item in inner:
        yield from _leaves(item, (*path, key))


def _select(plain: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        plain = dict(_items(plain)).get(part)
    return plain
