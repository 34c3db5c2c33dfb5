"""Turns the composed config into plain values: interpolations are resolved, except those for values that no file may or can hold.

A secret's `${oc.env:NAME}` stays until a rank needs the value (redaction.py), and so does `${object:torch.float32}`: a configuration names
a type, a class or a function, and the object is looked up when the component is made (targets/target.py).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_train.config.hydra_internals import register_resolver
from ddp_train.config.targets.target import RESOLVER
from ddp_train.config.tree import replace_values
from ddp_train.errors import ConfigError
from ddp_train.system import redaction

_MARK = "\0"  # replaces the braces: text that looks like an interpolation would be resolved again


def resolve(config: DictConfig, errors: list[ConfigError], *, section: str = "") -> dict[str, Any]:
    """Return a composed config, or one section of it, as plain containers.

    Args:
        errors: gets an error for every value that cannot be resolved.
        section: the name of the section that `config` is; a `???` in it stays, for a later override.
    """
    with _sealed():
        plain = _resolve(config, f"{section}." if section else "", errors, keeps_missing=bool(section))
    sealed = re.compile(f"{_MARK}(.*?){_MARK}")
    return {**replace_values(plain, "", lambda key, value: sealed.sub(r"${\1}", value) if isinstance(value, str) else value)}


def _resolve(node: DictConfig, prefix: str, errors: list[ConfigError], *, keeps_missing: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name in node:
        key, path = str(name), f"{prefix}{name!s}"  # text, as JSON has it on its way to the other ranks
        if OmegaConf.is_missing(node, name):
            if keeps_missing:
                plain[key] = "???"
                continue
            fix = f"{path}=my_package.MyClass" if name == "_target_" else f"{path}=VALUE"
            errors.append(ConfigError(key=path, happened="has no value yet (???)", fix=fix))
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig):
                plain[key] = _resolve(value, f"{path}.", errors, keeps_missing=keeps_missing)
            else:
                plain[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            errors.append(ConfigError(key=path, happened=str(error).splitlines()[0], expected="an interpolation that resolves"))
    return plain


@contextmanager
def _sealed() -> Iterator[None]:
    """Keep references to secrets and objects unresolved while the block runs: files, other machines and hashes must not get the values."""

    def env(name: str, *default: Any, _node_: Any) -> Any:
        is_secret = redaction.is_secret_reference(name) or redaction.is_secret_key(str(_node_._get_full_key(None)))
        return f"{_MARK}oc.env:{name}{_MARK}" if name in os.environ and is_secret else oc.env(name, *default)

    register_resolver("oc.env", env)
    register_resolver(RESOLVER, lambda path: f"{_MARK}{RESOLVER}:{path}{_MARK}")
    try:
        yield
    finally:
        register_resolver("oc.env", oc.env)
        OmegaConf.clear_resolver(RESOLVER)
