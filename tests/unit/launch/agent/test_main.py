"""One node's agent."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_train.launch.agent import elastic
from ddp_train.launch.agent.main import _quieten, run_torchrun
from ddp_train.launch.agent_process import AgentOptions
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.run_folder.result import Result, Status
from ddp_train.run_folder.verdict import exit_code_after_agent

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


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.PREEMPTED, Status.FAILED])
@pytest.mark.parametrize("restarts", [None, 0])
def test_a_rank_that_dies_after_the_end_of_the_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: Status, restarts: int | None
) -> None:
    run_folder, started_again = RunFolder(tmp_path), []
    before = Result(status=Status.COMPLETED, step=3)
    before.write(run_folder.result)
    died = {1: ProcessFailure(local_rank=1, pid=7, exitcode=-11, error_file="")}

    def run(options: object, ranks: object, *, handle_failures: elastic.HandleFailures, **others: object) -> None:
        Result(status=status, step=8).write(run_folder.result)
        started_again.append(handle_failures(died, 2))
        raise ChildFailedError("ddp_train", died)

    monkeypatch.setattr(elastic, "run_elastic_agent", run)
    options = AgentOptions(grace_s=1, run_folder=run_folder, restarts=restarts)
    code = run_torchrun(options, ["--max-restarts=2", "-m", "ddp_train"], NO_RANKS)
    if status is Status.FAILED:  # it did not end in good order
        assert started_again == [restarts is None] and failure.load_report(run_folder.failure) is not None
        return
    assert started_again == [False] and failure.load_report(run_folder.failure) is None
    assert "rank 1 on" in (said := capfd.readouterr().err) and "died after the run had ended: the process was ended by SIGSEGV" in said
    result = run_folder.read_result()
    assert result is not None and (result.status, result.step) == (status, 8) and not run_folder.starts.exists()
    assert exit_code_after_agent(run_folder, code, before=before) == (0 if status is Status.COMPLETED else 75)


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
