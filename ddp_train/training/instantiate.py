"""The one place that lets Hydra call what a `_target_` names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import hydra.utils
from hydra.errors import HydraException

from ddp_train.config import auto
from ddp_train.config.run_config import RunConfig
from ddp_train.config.schema import MADE
from ddp_train.config.spelling import removal
from ddp_train.config.target import locate, refusal
from ddp_train.config.tree import at, nodes
from ddp_train.errors import ConfigError, UserError
from ddp_train.interfaces import MetricWriter
from ddp_train.redaction import reveal


def build_writers(nodes: Mapping[str, Any], **run_facts: Any) -> list[MetricWriter]:
    """Build the metric writers of rank 0. An argument that is `auto` takes the run's fact of the same name."""
    answers = auto.answer({"metrics": nodes}, run_facts)
    return [instantiate(node, key=f"metrics.{name}", answers=answers) for name, node in nodes.items() if node]


def instantiate(node: Mapping[str, Any], *, key: str, answers: Mapping[str, Any] | None = None, first: Any = None) -> Any:
    """Create what a node names, after completing it with what only the run knows.

    Args:
        key: the node's config key, for errors.
        answers: values for the arguments that are `auto`, by their keys.
        first: a first positional argument (parameters, a model, an optimizer).

    Raises:
        UserError: its class raised; the message has the config key.
    """
    answers = answers or {}
    filled = {
        name: answers[f"{key}.{name}"] for name in node if f"{key}.{name}" in answers
    }  # as they are, whatever Hydra would make of them
    given = {name: auto.put(value, f"{key}.{name}", answers) for name, value in node.items() if name not in filled}
    try:
        make = hydra.utils.instantiate({"_convert_": "all", **reveal(given), "_partial_": True})
    except KeyError as error:
        raise ConfigError(key=key, happened=f"the environment variable {error} is not set here", fix=f"export {error}=...") from None
    except HydraException as error:  # of a node inside this one: its cause says more than Hydra's words around it
        cause = error.__cause__ or error
        refuse_unexpected(cause, node, key)
        cause.add_note(f"config key: {key}")
        raise cause from None
    if node.get("_partial_") and first is None:
        return functools.partial(make, **filled)
    try:
        return make(*([] if first is None else [first]), **filled)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ConfigError(key=key, happened=f"{node['_target_']}: {error}") from None  # the call itself did not fit
        refuse_unexpected(error, node, key)
        error.add_note(f"config key: {key}")
        raise


def refuse_tools(config: RunConfig) -> None:
    """Check once more what will be called: this process may find other modules under the same names than the one that composed."""
    for key, node in nodes({name: at(config.tree, name) for name in MADE}):
        if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
            for problem in refusal(node, key, locate(node["_target_"])):
                raise problem


def refuse_unexpected(error: BaseException, node: Mapping[str, Any], key: str) -> None:
    """Refuse an argument that a class passed on (`**kwargs`) to something that does not take it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    for place, value in nodes({key: node}) if found else ():
        if found and place.endswith(f".{found[1]}"):
            fix = f"remove it: {removal(place, value)}"
            raise ConfigError(key=place, happened=f"is passed on to something that does not take it: {error}", fix=fix) from error
