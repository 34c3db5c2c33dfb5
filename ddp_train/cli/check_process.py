"""Checks a configuration with the user's own components in a process that has imported torch already.

Their modules import torch, as a rule. What trains imports it, too (`launch/fork_requests.py`): twice takes twice the processor time and
memory. So that process checks, as soon as it has torch, and ends with its answer; a clone that it has forked before is the agent then.
"""

import os
import pickle
import sys
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig

from ddp_train.config.check import check_config
from ddp_train.config.hydra_internals import resolver_names
from ddp_train.config.run_config import RunConfig
from ddp_train.config.targets.locate import NeedsImport, importing_nothing
from ddp_train.errors import UserError
from ddp_train.launch.fork_requests import CheckRequest, early_fork_server
from ddp_train.system.process import file_in_memory


def check_in_torch_process(config: DictConfig, *, hydra: DictConfig, trains_here: bool) -> RunConfig:
    """Resolve and check a composed config, as `check_config` does, in this process or in one that has torch.

    `trains_here`: the process that imports torch for the ranks is needed next. Else, and for the jobs of a sweep, it is imported here.
    """
    if trains_here and "torch" not in sys.modules:
        try:
            with importing_nothing():
                return check_config(config, hydra=hydra)
        except NeedsImport:
            if (reply := _ask(config, hydra)) is not None:
                return reply
    return check_config(config, hydra=hydra)


def _ask(config: DictConfig, hydra: DictConfig) -> RunConfig | None:
    """Let the process with torch check, and return the checked config; None: it is gone, or cannot. UserError: the problems."""
    state = {"path": sys.path, "environment": dict(os.environ), "resolvers": resolver_names()}
    try:
        content = pickle.dumps({**state, "config": config, "hydra": hydra, "global": HydraConfig.instance().cfg})
    except Exception:  # of a user's own resolver or plugin
        return None
    files = [file_in_memory(content), file_in_memory(b"")]
    try:
        if early_fork_server.start(CheckRequest(files=files, imports=["torch"])).wait() != 0:  # before it has what an agent needs
            return None
        reply: RunConfig | UserError = _read(files[1])
    finally:
        for descriptor in files:
            os.close(descriptor)
    if isinstance(reply, UserError):
        raise reply
    return reply


def serve_check(request: CheckRequest) -> int:
    """Check what another process asks for, in the process of a fork server; return its exit code."""
    question, reply_file = request.files
    asked = _read(question)
    sys.path[:] = asked["path"]
    os.environ.clear()
    os.environ.update(asked["environment"])
    setup_globals()
    if asked["resolvers"] - resolver_names():
        return 1  # of a user's plugin
    HydraConfig.instance().cfg = asked["global"]
    try:
        reply: RunConfig | UserError = check_config(asked["config"], hydra=asked["hydra"])
    except UserError as error:
        reply = error
    with open(reply_file, "wb", closefd=False) as file:
        pickle.dump(reply, file)
    return 0


def _read(descriptor: int) -> Any:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return pickle.load(file)
