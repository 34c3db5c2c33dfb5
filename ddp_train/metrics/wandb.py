"""Weights & Biases. Needs `pip install "ddp-train[wandb]"`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ddp_train.metrics.tracker import Row, Tracker

if find_spec("wandb") is None:  # the client itself is imported by the thread: it takes a second, and training need not wait
    raise ModuleNotFoundError('the package wandb is not installed here: pip install "ddp-train[wandb]"', name="wandb")

_INIT_S = 30.0  # to reach the server; while it lasts, W&B lets no process end


class WandB(Tracker):
    """Sends the numbers to Weights & Biases, or with `mode=offline` into the run folder, from where `wandb sync` sends them.

    Args:
        run_dir: the run folder; the client's own files go to its `wandb/`.
        config: the run's whole config.
        run_name: of a sweep's job, what it has that others have not.
        step: the step that this attempt begins at.
        project: None: the config's `name`.
        entity: the user or team; None: the one that is logged in.
        mode: where the numbers go; None: as the environment says (`WANDB_MODE`), which is online.
        tags: for the run.
        close_timeout_s: how long the end of the run waits for what is not sent.
    """

    def __init__(
        self,
        run_dir: str,
        config: Mapping[str, Any],
        run_name: str = "",
        step: int = 0,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        tags: Sequence[str] = (),
        close_timeout_s: float = 30.0,
    ) -> None:
        folder = Path(run_dir).absolute()
        self._folder, self._mode, self._close_s = folder, mode, close_timeout_s
        self._run: Any = None
        self._given: dict[str, Any] = {
            "project": project or config["name"],
            "entity": entity,
            "mode": mode,
            "tags": list(tags),
            "config": dict(config),
            "name": run_name or folder.name,
            "group": folder.parent.name if run_name else None,  # of a sweep's jobs: the sweep
            "dir": str(folder),
        }
        super().__init__("W&B", "wandb", run_dir=run_dir, step=step, close_timeout_s=close_timeout_s)

    def connect(self, run_id: str | None) -> int | None:
        """Open the run. Its id is ours, and is kept before W&B hears of it."""
        import wandb

        if run_id is None:
            run_id = secrets.token_hex(4)
            self.remember(run_id)
        settings = wandb.Settings(
            console="off",  # stdout is the rank's
            silent=True,
            save_code=False,
            init_timeout=self._close_s if self.is_closing else _INIT_S,
            finish_timeout=self._close_s,  # also for what W&B does when the process ends
            finish_timeout_raises=True,
        )
        (self._folder / "wandb").mkdir(exist_ok=True)  # else W&B takes another folder
        self._run = wandb.init(**self._given, id=run_id, resume="allow", reinit="create_new", settings=settings)
        is_online = not self._run.settings._offline
        return self._run.starting_step - 1 if is_online and self._run.resumed else None

    def send(self, rows: Sequence[Row]) -> None:
        """Hand the rows to W&B's own process, which keeps them on disk until they are sent."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def finish(self) -> None:
        """Wait until W&B has everything, `close_timeout_s` at most."""
        self._run.finish(exit_code=0)

    def lost(self) -> str:
        """Return how to send it later."""
        return f"`wandb sync {self._folder}/wandb/*run-*` sends what is there" if self._run is not None else super().lost()
