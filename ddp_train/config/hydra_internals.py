"""What of Hydra and OmegaConf is private, in one place: seen with Hydra 1.3.5 to 1.4.0rc3 and OmegaConf 2.3 and 2.4.

There is no public way to compose a command line without running it, to read its options before Hydra leaves with a usage, and to limit
what a YAML may cost. OmegaConf copies whatever a YAML repeats by alias: 250 bytes can cost half a minute and half a gigabyte, and
`ddp-train status` reads folders of others, too. Where a version lacks one of these names, importing this module says which.
"""

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hydra.utils
import omegaconf.basecontainer
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl as ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path as create_config_search_path
from hydra._internal.utils import get_args_parser as get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from ddp_train.errors import ConfigError

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # Hydra's own: each combination of the values
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000

IS_1_4 = hasattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS")
MAIN: dict[str, Any] = {"execution_whitelist": vars(hydra.utils)["UNSAFE_DISABLE_EXECUTION_CHECKS"]} if IS_1_4 else {"version_base": "1.3"}
"""Arguments for `hydra.main`. Before 1.4 it warns where `version_base` is missing, since 1.4 where it is there. What is
composed is the user's own."""


def _delete_in_sweeps() -> None:
    """Let a job of a sweep delete a key with Hydra 1.4, whose sweepers write `~key` as `~key=null`: that deletes a null alone."""
    parser: Any = OverridesParser
    parse = parser.parse_overrides

    def parse_overrides(self: Any, overrides: list[str]) -> Any:
        return parse(self, [text.removesuffix("=null") if text.startswith("~") else text for text in overrides])

    parser.parse_overrides = parse_overrides


if IS_1_4:
    _delete_in_sweeps()


@contextmanager
def composing_once() -> Iterator[None]:
    """Let Hydra compose a single run once while the block runs: 1.3 composes to learn `hydra.mode`, and again to run; 1.4 does not."""
    if IS_1_4:
        yield
        return

    def get_mode(self: Any, config_name: str | None, overrides: list[str]) -> RunMode | None:
        if get_args_parser().parse_args().multirun:
            return None  # Hydra adds hydra.mode=MULTIRUN
        if any(text.lstrip("+").startswith("hydra.mode=") and text.endswith(RunMode.MULTIRUN.name) for text in overrides):
            return RunMode.MULTIRUN
        composed = self.compose_config(config_name, overrides, run_mode=RunMode.RUN, with_log_configuration=True)
        if composed.hydra.mode != RunMode.MULTIRUN:  # which a YAML may ask for
            self.compose_config = lambda **asked: composed
        return composed.hydra.mode or RunMode.RUN

    patched, before = Hydra, Hydra.get_mode
    patched.get_mode = get_mode  # type: ignore[method-assign]
    try:
        yield
    finally:
        patched.get_mode = before  # type: ignore[method-assign]


def resolver_names() -> set[str]:
    """Return the names by which OmegaConf knows resolvers."""
    return set(omegaconf.basecontainer.BaseContainer._resolvers)


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Let OmegaConf answer `${NAME:...}` so, in the place of what did it before."""
    register: Any = OmegaConf.register_resolver if IS_1_4 else OmegaConf.register_new_resolver  # OmegaConf 2.4 warns of the latter
    register(name, resolver, replace=True)


def yaml_loader() -> Any:
    """Return the class by which OmegaConf reads YAML."""
    return vars(omegaconf.basecontainer)["get_yaml_loader"]()


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Return a tree of plain values as YAML, exactly as OmegaConf writes it, which takes twice as long: it makes config objects first."""
    return str(yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False))


class _Dumper(get_omega_conf_dumper()):  # type: ignore[misc]  # a function returns it
    def ignore_aliases(self, data: Any) -> bool:
        """Write a list that is in two places twice, without an alias."""
        return True


def limit_yaml() -> None:
    """Let OmegaConf's YAML loader refuse what is too large before it copies it. Again does nothing."""
    if hasattr(loader := yaml_loader(), "is_limited"):
        return
    limited = _limited(loader)
    for name in ("_utils", "_yaml", "basecontainer", "omegaconf"):  # modules that ask for the class by name; OmegaConf 2.4 has moved it
        module: Any = sys.modules.get(f"omegaconf.{name}")
        if hasattr(module, "get_yaml_loader"):
            module.get_yaml_loader = limited


def _limited(loader: Any) -> Any:
    class Limited(loader):  # type: ignore[misc]
        """OmegaConf's loader, which refuses what is too large, too deep or repeats itself too often."""

        is_limited = True

        def __init__(self, stream: Any) -> None:
            text = stream if isinstance(stream, (str, bytes)) else stream.read(MAX_CHARACTERS + 1)
            self._where = where = str(getattr(stream, "name", "YAML"))
            if len(text) > MAX_CHARACTERS:
                _refuse(f"{where} has more than {MAX_CHARACTERS:,} characters")
            named: Any = io.StringIO(text) if isinstance(text, str) else io.BytesIO(text)
            named.name = where  # for the parser's messages
            super().__init__(named)

        def get_single_node(self) -> Any:
            try:
                parsed = super().get_single_node()
                values, levels = (0, 0) if parsed is None else _size(parsed, {})
            except RecursionError:
                values, levels = 0, MAX_DEPTH + 1
            if levels > MAX_DEPTH:
                _refuse(f"{self._where} is nested more than {MAX_DEPTH} levels deep")
            if values > MAX_NODES:
                _refuse(f"{self._where} has more than {MAX_NODES:,} values when its aliases are written out")
            return parsed

    return lambda **its_own_limits: Limited  # OmegaConf 2.4 has some


def _size(parsed: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values and levels a YAML has with every alias written out."""
    if id(parsed) not in known:
        known[id(parsed)] = MAX_NODES, 0  # an alias of what it stands in
        items = [] if isinstance(parsed, yaml.ScalarNode) else parsed.value  # of a mapping: pairs
        inner = [_size(part, known) for item in items for part in (item if isinstance(item, tuple) else (item,))]
        known[id(parsed)] = 1 + sum(values for values, _ in inner), 1 + max((levels for _, levels in inner), default=0)
    return known[id(parsed)]


def _refuse(happened: str) -> None:
    expected = f"at most {MAX_CHARACTERS:,} characters, {MAX_DEPTH} levels and {MAX_NODES:,} values"
    fix = "put large data into a separate file, and its path into the configuration"
    raise ConfigError(happened=happened, expected=expected, fix=fix)
