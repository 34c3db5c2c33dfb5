"""MLflow. Needs `pip install "ddp-train[mlflow]"`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddp_train.metrics.tracker import Media, Row, Tracker, require

require("mlflow")

_MAX_METRICS, _MAX_PARAMS = 1000, 100  # in one message: MLflow's own limits
_MAX_PARAM_LENGTH = 500  # characters; servers before MLflow 2.8 take no more


@dataclass(kw_only=True, eq=False)
class MLflow(Tracker):
    """Sends numbers, images and texts to an MLflow server, or into a local store.

    Args:
        run_dir, config, run_name, step, close_timeout_s: as in `Tracker`; the config's values become parameters.
        tracking_uri: a server's URL or `sqlite:///FILE`; None: as the environment says (`MLFLOW_TRACKING_URI`), else MLflow's own.
        experiment: None: the config's `name`.
    """

    service, file = "MLflow", "mlflow"

    tracking_uri: str | None = None
    experiment: str | None = None

    def connect(self, run_id: str | None) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient(self.tracking_uri)
        if run_id is not None:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return self._newest_step()
        self._run_id = self._client.create_run(self._experiment_id(), run_name=self.run_name).info.run_id
        self.remember(self._run_id)
        params = [Param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in _leaves(self.config)]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        return None

    def send(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics: list[Any] = []
        for row in rows:
            of_row = [Metric(name, float(value), int(1e3 * row.time), row.step) for name, value in row.values.items()]
            if len(metrics) + len(of_row) > _MAX_METRICS:
                self._client.log_batch(self._run_id, metrics=metrics)
                metrics = []
            metrics += of_row
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, media: Media, step: int) -> None:
        """Send an image, which MLflow shows by step, or a text as a file of the run's artifacts."""
        name = re.sub(r"[^a-zA-Z0-9_./ -]", "_", media.name)  # MLflow refuses other characters
        if isinstance(media.content, str):
            self._client.log_text(self._run_id, media.content, f"texts/{name.replace('/', '~')}~{step:08}.md")
        else:
            self._client.log_image(self._run_id, media.content, key=name, step=step)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _experiment_id(self) -> str:
        name = self.experiment or self.config["name"]
        with suppress(Exception):  # it is there: another job of a sweep may have made it just now
            return str(self._client.create_experiment(name))
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def _newest_step(self) -> int:
        """Return the newest step that the server has: a kill may have come between its answer and our state file."""
        by_split = {name.partition("/")[0]: name for name in self._client.get_run(self._run_id).data.metrics}
        histories = (self._client.get_metric_history(self._run_id, name) for name in by_split.values())
        return max((metric.step for history in histories for metric in history), default=-1)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
