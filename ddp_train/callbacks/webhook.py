"""Post a run's progress to a chat or a service by HTTP. A dead or slow server never delays the run."""

import json
import urllib.request
from collections.abc import Mapping
from threading import Thread
from typing import Any, ClassVar

from ddp_train.errors import ConfigError
from ddp_train.interfaces import Callback, Run

_TIMEOUT_S = 10.0
_LAST_WAIT_S = 5.0


class Webhook(Callback):
    """Posts JSON when the run starts, after each evaluation, when a rank is slow, and when it has ended without a failure.

    Each post has `text` (and the same as `content`), which chats show, and `event`, `run`, `step`, `total_steps`, `status`, `metrics`.
    Rank 0 alone posts, each time in a thread. While the last post still waits for the server, new ones are dropped and counted.

    Args:
        url: http:// or https://; one that is a secret stays in the environment: '${oc.env:WEBHOOK_URL}'.
        slow_ranks: post that a rank is slow, or that the run waits for data (docs/time.md).
        min_goodput: post once when the goodput after an evaluation is below, 0 to 1; null: never.
    """

    argument_ranges: ClassVar = {"min_goodput": {"min": 0, "below": 1}}

    def __init__(self, url: str, *, slow_ranks: bool = True, min_goodput: float | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(key=".url", happened="is not a web address", expected="http://... or https://...")
        self._url = url
        self._thread: Thread | None = None
        self._num_lost = self._num_reports = 0
        self._posts_reports, self._min_goodput = slow_ranks, min_goodput

    def on_step(self, run: Run) -> None:
        if self._posts_reports and len(run.reports) > self._num_reports and not self._is_busy():
            report = run.reports[self._num_reports]  # one a step: the others wait for its thread
            self._num_reports += 1
            self._post(run, str(report["kind"]), f"{run.folder.name} step {report.get('step', run.step)}: {report['text']}")

    def on_start(self, run: Run) -> None:
        self._post(run, "start", f"{run.folder.name} continues after step {run.step}" if run.step else f"{run.folder.name} begins")

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        event = "evaluation"
        goodput = run.goodput() if self._min_goodput is not None and run.rank == 0 and not self._is_busy() else None
        if goodput is not None and goodput < (self._min_goodput or 0.0):
            event, self._min_goodput = "goodput", None
            numbers += f"; only {goodput:.1%} of the time goes into steps"
        self._post(run, event, f"{run.folder.name} step {run.step}/{run.total_steps}: {numbers}", metrics)

    def on_end(self, run: Run) -> None:
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)
        evaluated = {name: value for name, value in run.metrics.items() if name.startswith("eval/")}
        self._post(run, "end", f"{run.folder.name}: {run.status} after step {run.step}", evaluated)
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)
            self._num_lost += self._thread.is_alive()
        if self._num_lost:
            print(f"webhook: {self._num_lost} messages did not reach the server", flush=True)

    def _post(self, run: Run, event: str, text: str, metrics: Mapping[str, float] | None = None) -> None:
        if run.rank != 0:
            return
        if self._is_busy():
            self._num_lost += 1
            return
        content: dict[str, Any] = {"text": text, "content": text, "event": event, "run": str(run.folder), "status": run.status}
        content |= {"step": run.step, "total_steps": run.total_steps, "metrics": dict(metrics or {})}
        self._thread = Thread(target=self._send, args=(content,), name="webhook", daemon=True)
        self._thread.start()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _send(self, content: Mapping[str, Any]) -> None:
        try:
            headers = {"Content-Type": "application/json", "User-Agent": "ddp-train"}
            request = urllib.request.Request(self._url, json.dumps(content).encode(), headers)
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except Exception as error:  # no error may stop the run; its text may hold the address, which may be a secret
            self._num_lost += 1
            if self._num_lost == 1:
                print(f"webhook: the server does not answer ({type(error).__name__}); the run continues", flush=True)
