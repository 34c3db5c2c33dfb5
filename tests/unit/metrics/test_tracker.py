"""What a tracker is told: every step once, also after kills and from servers that were dead; the loop never waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from ddp_train.metrics import tracker
from ddp_train.metrics.jsonl import JsonLines
from ddp_train.metrics.tracker import Media, Row, Tracker
from tests.unit.metrics.records import record


class Service:
    """What a tracker talks to: it outlives the writers."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.shown: list[tuple[int, int, Media]] = []  # after how many rows, of which step
        self.ids: list[str | None] = []
        self.is_finished = False
        self.answers = Event()
        self.answers.set()

    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


class Client(Tracker):
    service, file = "test", "test"

    def __init__(self, service: Service, run_dir: Path, *, step: int = 0, close_timeout_s: float = 20.0) -> None:
        self.there = service
        super().__init__(run_dir=str(run_dir), config={"name": "x"}, step=step, close_timeout_s=close_timeout_s)

    def connect(self, run_id: str | None) -> int | None:
        if not self.there.answers.is_set():
            raise ConnectionError("refused")
        self.there.ids.append(run_id)
        self.remember(run_id or "abc")
        return None

    def send(self, rows: Sequence[Row]) -> None:
        if not self.there.answers.is_set():
            raise ConnectionError("refused")
        self.there.rows += rows

    def show(self, media: Media, step: int) -> None:
        if media.name == "bad":
            raise ValueError("no such format")
        self.there.shown.append((len(self.there.rows), step, media))

    def finish(self) -> None:
        self.there.is_finished = True


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
            client.closing.set()  # nothing that waits in memory leaves it
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
    assert said == "test is behind (ConnectionError: refused); training continues, and rows are sent again later\n"  # once
    service.answers.set()
    client.close()
    assert service.steps() == [*range(1, 1001)]
    assert capsys.readouterr().out in ("", "test is up to date again\n")  # not said at the end


def test_what_a_dead_server_did_not_get_is_said_and_a_resumed_run_sends_it(
    attempt: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service()
    service.answers.clear()
    attempt(service, 0, 4, close_timeout_s=0.2)
    assert "test did not accept everything within 0.2 s; metrics.jsonl has it" in capsys.readouterr().out
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


def test_images_and_texts_go_with_the_numbers_of_their_step(tmp_path: Path) -> None:
    service = Service()
    client = Client(service, tmp_path)
    client.write_text("hello", "before the first step", 0)
    image = torch.zeros(3, 2, 4, dtype=torch.uint8)
    for step in range(1, 5):
        if step == 2:
            client.write_image("seen", image, step)
            image.fill_(9)  # the next picture in the same memory
            client.write_image("grey", torch.ones(1, 2, 4), step)
        client.write(record(step, loss=0.5))
    client.close()
    assert service.steps() == [1, 2, 3, 4]  # without one of step 0, which has no numbers
    assert [(count, step, shown.name) for count, step, shown in service.shown] == [(0, 0, "hello"), (2, 2, "seen"), (2, 2, "grey")]
    seen, grey = (shown.content for _, _, shown in service.shown[1:])
    assert not isinstance(seen, str) and seen.shape == (2, 4, 3) and not seen.any()
    assert not isinstance(grey, str) and grey.shape == (2, 4) and (grey == 255).all()


def test_one_that_the_service_does_not_take_holds_up_nothing_and_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    client = Client(service, tmp_path)
    for step in range(1, 4):
        client.write_text("bad", "text", step)
        client.write_text("good", "text", step)
        client.write(record(step))
    client.close()
    assert service.steps() == [1, 2, 3] and [step for _, step, _ in service.shown] == [1, 2, 3] and service.is_finished
    assert capsys.readouterr().out == "test refused `bad` (ValueError: no such format); such images and texts are dropped\n"


def test_a_dead_server_costs_so_much_memory_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "_MAX_MEDIA_BYTES", 100)
    service = Service()
    service.answers.clear()
    client = Client(service, tmp_path)
    for step in range(1, 6):
        client.write_text("text", 40 * "a", step)
        client.write(record(step))
    service.answers.set()
    client.close()
    assert service.steps() == [1, 2, 3, 4, 5] and [step for _, step, _ in service.shown] == [1, 2]
    assert capsys.readouterr().out.count("more are dropped until they are sent") == 1
    assert client._media_in == client._media_done == 80


def test_what_was_shown_of_a_step_that_the_service_has_is_not_shown_again(tmp_path: Path) -> None:
    service = Service()
    for first in (0, 2):  # the second goes on from an earlier checkpoint
        client = Client(service, tmp_path, step=first)
        for step in range(first + 1, 5):
            client.write_text("text", str(first), step)
            client.write(record(step))
        client.close()
    assert [(step, shown.content) for _, step, shown in service.shown] == [(step, "0") for step in range(1, 5)]
