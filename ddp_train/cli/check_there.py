"""The check of a configuration that names somebody's own components, in a process that has imported torch already.

Their modules import torch, as a rule. What trains imports it, too (`launch/agent_process.py`): twice takes twice the processor time and
memory. So a fork of that process checks, as soon as it has torch, and is gone when it has answered.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig
from omegaconf.basecontainer import BaseContainer

from ddp_train.config.check import ConfigErrors, check
from ddp_train.config.run_config import RunConfig
from ddp_train.config.targets.target import NeedsImport, importing_nothing
from ddp_train.errors import ConfigError
from ddp_train.launch.agent_process import ask_early, expect_agents
from ddp_train.system.process import file_in_memory

_CANNOT = 1


def check_where_torch_is(config: DictConfig, *, hydra: DictConfig, trains_here: bool) -> RunConfig:
    """Resolve and check a composed config, as `check` does, in this process or in one that has torch.

    Args:
        trains_here: what imports torch for the ranks is needed next: it begins where it has not. Else, and for the many jobs of a sweep,
            torch is imported here.
    """
    if trains_here and "torch" not in sys.modules:
        try:
            with importing_nothing():
                return check(config, hydra=hydra)
        except NeedsImport:
            pass
        expect_agents()
        if (found := _ask(config, hydra)) is not None:
            return found
    return check(config, hydra=hydra)


def _ask(config: DictConfig, hydra: DictConfig) -> RunConfig | None:
    """Let the other process check; None: it is gone, or cannot.

    Raises:
        ConfigError, ConfigErrors: what it has found.
    """
    state = {"path": sys.path, "environment": dict(os.environ), "resolvers": set(BaseContainer._resolvers)}
    try:
        asked = pickle.dumps({**state, "config": config, "hydra": hydra, "global": HydraConfig.instance().cfg})
    except Exception:  # what somebody's own resolver or plugin has put there
        return None
    request, answered = file_in_memory(asked), file_in_memory(b"")
    try:
        child = ask_early({"check": True}, files=[request, answered])
        if child is None or child.wait() != 0:
            return None
        with open(answered, "rb", closefd=False) as file:
            file.seek(0)
            found = pickle.load(file)
    finally:
        os.close(request)
        os.close(answered)
    if isinstance(found, list):
        raise ConfigErrors(found)
    if isinstance(found, ConfigError):
        raise found
    assert isinstance(found, RunConfig)
    return found


def answer(request: int, answered: int) -> int:
    """Check what another process asks for, in a fork that does nothing else; return its exit code."""
    with open(request, "rb") as file:
        file.seek(0)
        asked = pickle.load(file)
    sys.path[:] = asked["path"]
    os.environ.clear()
    os.environ.update(asked["environment"])
    setup_globals()
    if asked["resolvers"] - set(BaseContainer._resolvers):
        return _CANNOT  # of somebody's plugin
    HydraConfig.instance().cfg = asked["global"]
    found: Any
    try:
        found = check(asked["config"], hydra=asked["hydra"])
    except ConfigErrors as errors:
        found = errors.errors
    except ConfigError as error:
        found = error
    with open(answered, "wb") as file:
        pickle.dump(found, file)
    return 0
