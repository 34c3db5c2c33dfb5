"""The launcher's end of a group of ranks."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddp_train.errors import INTERRUPTED
from ddp_train.launch.agent_process import AgentOptions
from ddp_train.launch.job import Job
from ddp_train.run_folder import failure
from ddp_train.run_folder.paths import RunFolder
from ddp_train.sweep import warm_group
from ddp_train.system import process_env
from ddp_train.system.process import fork
from tests.unit.parts import checked


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[warm_group.WarmSlot]:
    """Give a slot with a job, which lies in the socket of a member that reads nothing."""

    def start_agent_that_reads_nothing(options: AgentOptions, arguments: list[str], *, environment: Mapping[str, str]) -> int:
        def be_agent() -> int:
            with socket.socket(socket.AF_UNIX) as launcher:
                launcher.connect(f"{environment[process_env.GROUP]}/socket")
                time.sleep(60)
            return 0

        return fork(be_agent)

    monkeypatch.setattr(warm_group, "start_agent", start_agent_that_reads_nothing)
    slot = warm_group.WarmSlot(tmp_path / "agent.log")
    slot.start(Job(config=checked(), run_folder=RunFolder(tmp_path), command=[], overrides=[], in_sweep=True))
    assert slot.poll(10) is None
    yield slot
    slot.end()


def test_killing_a_group_that_has_not_read_its_job_yet_is_an_interruption(slot: warm_group.WarmSlot) -> None:
    slot.stop(signal.SIGKILL)
    assert slot.poll(10) == INTERRUPTED


def test_a_full_disk_costs_the_report_of_a_killed_group_and_not_the_sweep(
    slot: warm_group.WarmSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failure, "create_json", full)
    os.kill(slot._agent.pid, signal.SIGKILL)  # another process ends it
    assert slot.poll(10) == 128 + signal.SIGKILL
    assert not (tmp_path / "failure.json").exists()
