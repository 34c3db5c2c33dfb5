"""One node's agent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_train.launch.agent.main import _quieten


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
