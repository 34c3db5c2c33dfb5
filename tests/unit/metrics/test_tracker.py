"""What a tracker is told: every step once, also after kills and from servers that were dead; the loop never waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest

from ddp_train.metrics import tracker
from ddp_train.metrics.jsonl import JsonLines
from ddp_train.metrics.tracker import Row, Tracker
from tests.unit.metrics.records import record


class Service:
    """What a tracker talks to: it outlives the writers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ids: list[str | None] = []
        self.is_finished = False
        self.answers = Event()
        self.answers.set()

    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


class Client(Tracker):
    def __init__(self, service: Service, run_dir: Path, *, step: int = 0, close_timeout_s: float = 20.0) -> None:
        self.service = service
        super().__init__("test", "test", run_dir=str(run_dir), step=step, close_timeout_s=close_timeout_s)

    def connect(self, run_id: str | None) -> int | None:
        if not self.service.answers.is_set():
            raise ConnectionError("refused")
        self.service.ids.append(run_id)
        self.remember(run_id or "abc")
        return None

    def send(self, rows: Sequence[Row]) -> None:
        if not self.service.answers.is_set():
            raise ConnectionError("refused")
        self.service.rows += rows

    def finish(self) -> None:
        self.service.is_finished = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "_BATCH_S", 0.001)
    monkeypatch.setattr(tracker, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[..., None]:
    """Give what writes steps as one attempt does, to metrics.jsonl and to a service."""

    def run(service: Service, first: int, last: int, *, is_killed: bool = False, close_timeout_s: float = 20.0) -> None:
        jsonl, client = JsonLines(str(tmp_path), step=first), Client(service, tmp_path, step=first, close_timeout_s=close_timeout_s)
        for step in range(first + 1, last + 1):
            for each in (record(step, loss=1 / step), record(step, "eval", accuracy=0.5)):
                jsonl.write(each)
                client.write(each)
        if is_killed:
            client._closing.set()  # nothing that waits in memory leaves it
            client._is_given_up = True
            client._has_work.set()
            client._thread.join()
        else:
            client.close()
        jsonl.close()

    return run


def test_a_step_is_one_row_with_the_values_of_all_splits(tmp_path: Path, attempt: Callable[..., None]) -> None:
    service = Service()
    attempt(service, 0, 3)
    assert service.steps() == [1, 2, 3]
    assert service.rows[1].values == {"epoch": 0.2, "samples": 64, "train/loss": 0.5, "eval/accuracy": 0.5}
    assert service.is_finished
    assert json.loads((tmp_path / "trackers/test.json").read_text()) == {"id": "abc", "step": 3}


def test_no_step_twice_and_none_missing_after_a_kill_and_the_id_is_kept(attempt: Callable[..., None]) -> None:
    service = Service()
    attempt(service, 0, 7)
    attempt(service, 5, 9, is_killed=True)  # from a checkpoint before what the service has
    attempt(service, 9, 10)
    assert service.steps() == [*range(1, 11)]
    assert service.ids[0] is None and {*service.ids[1:]} == {"abc"}


def test_a_dead_server_costs_the_loop_nothing_and_gets_all_of_it_later(
    tmp_path: Path, attempt: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service()
    service.answers.clear()
    started = time.monotonic()
    client = Client(service, tmp_path)
    for step in range(1, 1001):
        client.write(record(step, loss=0.1))
    assert time.monotonic() - started < 5
    while not (said := capsys.readouterr().out):
        time.sleep(0.01)
    assert said == "test is behind (ConnectionError: refused); training goes on, and it is tried again\n"  # once
    service.answers.set()
    client.close()
    assert service.steps() == [*range(1, 1001)]
    assert capsys.readouterr().out in ("", "test has everything again\n")  # nobody says it at the end


def test_what_a_dead_server_did_not_get_is_said_and_a_resumed_run_sends_it(
    attempt: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service()
    service.answers.clear()
    attempt(service, 0, 4, close_timeout_s=0.2)
    assert "test did not take everything within 0.2 s; metrics.jsonl has it" in capsys.readouterr().out
    service.answers.set()
    attempt(service, 4, 6)
    assert service.steps() == [*range(1, 7)]


def test_a_server_that_hangs_holds_up_the_end_for_so_long_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Event()
    monkeypatch.setattr(Client, "send", lambda self, rows: hangs.wait())
    client = Client(Service(), tmp_path, close_timeout_s=0.1)
    client.write(record(1))
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 5
    hangs.set()
    client._thread.join()
