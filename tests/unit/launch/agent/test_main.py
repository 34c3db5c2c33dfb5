"""One node's agent."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddp_train.launch.agent import elastic
from ddp_train.launch.agent.main import _quieten, run_torchrun
from ddp_train.launch.fork_requests import AgentOptions

NO_RANKS: Any = None  # where nothing is started


@pytest.fixture(autouse=True)
def puts_loggers_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    loggers = [logging.getLogger(name) for name in ("torch", "torch.distributed", "torch.distributed.run", "torch.distributed.elastic")]
    before = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for handler in logging.getLogger("torch").handlers:
        with suppress(OSError):
            handler.close()
    for logger, handlers, propagates in before:
        logger.handlers, logger.propagate = handlers, propagates


def test_a_log_that_cannot_be_written_drowns_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    _quieten(Path("/dev/full"))
    logging.getLogger("torch.distributed.elastic").warning("of no interest to anybody")
    assert capfd.readouterr().err == ""


def test_ranks_have_their_time_after_a_stop_where_torch_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 torch's `_shutdown` has no argument for it."""
    agent: Any = object.__new__(elastic._Agent)
    agent._grace_s, agent._ends_within_s = 7, 3
    monkeypatch.setattr(elastic.LocalElasticAgent, "_shutdown", lambda self, death_sig: None)
    agent._shutdown(signal.SIGTERM, 30)
    assert agent._ends_within_s == 7


def test_several_machines_are_refused_where_torch_lacks_what_our_agent_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("torch.distributed.launcher.api.LocalElasticAgent")
    assert run_torchrun(AgentOptions(grace_s=1, restarts=0), ["--nproc-per-node=1", "-m", "ddp_train"], NO_RANKS) == 78
    assert "has no torch.distributed.launcher.api.LocalElasticAgent" in capsys.readouterr().err
