"""What is posted, and that a server that is dead, slow or angry holds nothing up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from ddp_train.callbacks.webhook import Webhook
from ddp_train.errors import ConfigError
from tests.unit.callbacks.fake_run import FakeRun


class Server(ThreadingHTTPServer):
    """Keeps what is posted; answers when it may."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[dict[str, Any]] = []
        self.may_answer = Event()
        self.may_answer.set()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.may_answer.wait(10)
        self.server.posts.append(json.loads(content))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.may_answer.set()
        made.shutdown()
        thread.join()


def test_a_run_tells_how_it_goes(server: Server) -> None:
    hook, run = Webhook(f"http://127.0.0.1:{server.server_port}/secret"), FakeRun(metrics={"eval/loss": 0.5, "train/loss": 0.4})
    hook.on_start(run)
    assert hook._thread is not None
    hook._thread.join()
    run.step, run.status = 7, "completed"
    hook.on_end(run)
    assert [post["event"] for post in server.posts] == ["start", "end"]
    assert server.posts[1]["text"] == server.posts[1]["content"] == "fake: completed after step 7"
    assert server.posts[1]["metrics"] == {"eval/loss": 0.5}
    hook.on_start(FakeRun(rank=1))
    assert len(server.posts) == 2


def test_a_slow_server_misses_messages_and_the_run_does_not_wait(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.may_answer.clear()
    hook, run = Webhook(f"http://127.0.0.1:{server.server_port}"), FakeRun()
    started = time.monotonic()
    for _ in range(3):
        hook.on_evaluation(run, {"loss": 0.5})
    assert time.monotonic() - started < 2
    server.may_answer.set()
    hook.on_end(run)
    assert [post["event"] for post in server.posts] == ["evaluation", "end"]
    assert "2 messages did not reach the server" in capsys.readouterr().out


def test_a_dead_server_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as gone:
        address = f"http://127.0.0.1:{gone.server_port}/secret"
    hook, run = Webhook(address), FakeRun()
    for _ in range(2):
        hook.on_evaluation(run, {})
        assert hook._thread is not None
        hook._thread.join()
    hook.on_end(run)
    said = capsys.readouterr().out
    assert said.count("does not answer") == 1 and "3 messages" in said and "secret" not in said


def test_only_web_servers_are_told() -> None:
    with pytest.raises(ConfigError, match="http://"):
        Webhook("file:///etc/passwd")


def test_a_slow_rank_is_posted_once_and_a_low_goodput_with_the_evaluation_that_finds_it(server: Server) -> None:
    hook, run = Webhook(f"http://127.0.0.1:{server.server_port}/", min_goodput=0.8), FakeRun(share_of_steps=0.9)

    def posted() -> list[dict[str, Any]]:
        if hook._thread is not None:
            hook._thread.join()
        return server.posts

    hook.on_step(run)
    assert posted() == []
    run.reports.append({"kind": "slow_rank", "text": "rank 1 on node1"})
    for _ in range(3):
        hook.on_step(run)
        posted()
    hook.on_evaluation(run, {"loss": 0.5})
    posted()
    for _ in range(2):
        run.share_of_steps = 0.71
        hook.on_evaluation(run, {"loss": 0.5})
        posted()
    assert [post["event"] for post in server.posts] == ["slow_rank", "evaluation", "goodput", "evaluation"]
    assert server.posts[0]["text"] == "fake step 0: rank 1 on node1"
    assert server.posts[2]["text"] == "fake step 0/100: loss 0.5; only 71.0% of the time goes into steps"


def test_all_reports_of_a_step_are_posted_and_a_low_goodput_once_the_server_is_free(server: Server) -> None:
    hook, run = Webhook(f"http://127.0.0.1:{server.server_port}/", min_goodput=0.8), FakeRun(share_of_steps=0.5)
    run.reports += [{"kind": "slow_rank", "text": "a", "step": 3}, {"kind": "waits_for_data", "text": "b", "step": 3}]
    server.may_answer.clear()
    for _ in range(3):
        hook.on_step(run)
    hook.on_evaluation(run, {})  # dropped: the server is busy
    server.may_answer.set()
    for call in (lambda: hook.on_step(run), lambda: hook.on_evaluation(run, {})):
        assert hook._thread is not None
        hook._thread.join()
        call()
    hook._thread.join()
    assert [(post["event"], post["text"][:14]) for post in server.posts[:2]] == [
        ("slow_rank", "fake step 3: a"),
        ("waits_for_data", "fake step 3: b"),
    ]
    assert [post["event"] for post in server.posts[2:]] == ["goodput"]


def test_slow_ranks_are_posted_only_where_they_are_wanted(server: Server) -> None:
    hook, run = Webhook(f"http://127.0.0.1:{server.server_port}/", slow_ranks=False), FakeRun(reports=[{"kind": "slow_rank", "text": ""}])
    hook.on_step(run)
    assert hook._thread is None
