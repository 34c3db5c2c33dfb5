"""trackio. Needs `pip install "ddp-train[trackio]"`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_train.metrics.tracker import Row, Tracker

if find_spec("trackio") is None:  # the client itself is imported by the thread: it takes a second, and training need not wait
    raise ModuleNotFoundError('the package trackio is not installed here: pip install "ddp-train[trackio]"', name="trackio")


class Trackio(Tracker):
    """Writes the numbers into trackio's files on this machine, or sends them to a Space of Hugging Face.

    Args:
        run_dir: the run folder.
        config: the run's whole config.
        run_name: of a sweep's job, what it has that others have not.
        step: the step that this attempt begins at.
        project: None: the config's `name`.
        space_id: the Space, as `user/name`; None: as the environment says (`TRACKIO_SPACE_ID`), else this machine (`TRACKIO_DIR`).
        close_timeout_s: how long the end of the run waits for what is not sent.
    """

    def __init__(
        self,
        run_dir: str,
        config: Mapping[str, Any],
        run_name: str = "",
        step: int = 0,
        project: str | None = None,
        space_id: str | None = None,
        close_timeout_s: float = 30.0,
    ) -> None:
        folder = Path(run_dir).absolute()
        self._name_there = run_name or folder.name
        self._given: dict[str, Any] = {
            "project": project or config["name"],
            "space_id": space_id,
            "config": dict(config),
            "group": folder.parent.name if run_name else None,  # of a sweep's jobs: the sweep
            "embed": False,
        }
        self._run: Any = None
        super().__init__("trackio", "trackio", run_dir=run_dir, step=step, close_timeout_s=close_timeout_s)

    def connect(self, run_id: str | None) -> int | None:
        """Open the run. trackio knows a run by its name, which is therefore one of its own."""
        import trackio

        if run_id is None:
            run_id = f"{self._name_there}-{secrets.token_hex(3)}"
            self.remember(run_id)
        self._run = trackio.init(name=run_id, resume="allow", **self._given)
        return None

    def send(self, rows: Sequence[Row]) -> None:
        """Hand the rows to trackio's own thread."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def finish(self) -> None:
        """Wait until they are written."""
        self._run.finish()
