"""How large a YAML or an override may be, before OmegaConf and Hydra act on it.

OmegaConf copies whatever a YAML repeats by alias: 250 bytes can cost half a minute and half a gigabyte, and `ddp-train status` reads
folders of others, too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import yaml

from ddp_train.config import hydra_internals
from ddp_train.errors import ConfigError

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000


def install() -> None:
    """Make OmegaConf's YAML loader look first. Once in a process; again does nothing."""
    if not hasattr(hydra_internals.yaml_loader(), "is_limited"):
        hydra_internals.replace_yaml_loader(_limited(hydra_internals.yaml_loader()))


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that Hydra's parser would choke on."""
    for text in overrides:
        depth = deepest = 0
        for char in text:
            depth += (char in "[{(") - (char in "]})")
            deepest = max(deepest, depth)
        if len(text) > MAX_CHARACTERS or deepest > MAX_DEPTH:
            _refuse(text.partition("=")[0][:80], f"has {len(text):,} characters, {deepest} levels deep")


class _Named(io.StringIO):
    """A text that the parser's messages name by its file."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def _limited(loader: Any) -> Any:
    class Limited(loader):  # type: ignore[misc]
        """OmegaConf's loader, which refuses what is too large, too deep or repeats itself too often."""

        is_limited = True

        def __init__(self, stream: Any) -> None:
            text = stream if isinstance(stream, (str, bytes)) else stream.read(MAX_CHARACTERS + 1)
            self._where = str(getattr(stream, "name", "YAML"))
            if len(text) > MAX_CHARACTERS:
                _refuse("", f"{self._where} has more than {MAX_CHARACTERS:,} characters")
            super().__init__(_Named(text, self._where) if isinstance(text, str) else text)

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
    expected = f"at most {MAX_CHARACTERS:,} characters, {MAX_DEPTH} levels and {MAX_NODES:,} values"
    fix = "put large data into a file of its own, and its path into the configuration"
    raise ConfigError(key=key, happened=happened, expected=expected, fix=fix)
