"""Weights & Biases. Needs `pip install "ddp-train[wandb]"`."""

from __future__ import annotations

import html
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddp_train.metrics.tracker import Media, Tracker, require

require("wandb")

_INIT_S = 30.0  # to reach the server; while it lasts, W&B lets no process end


@dataclass(kw_only=True, eq=False)
class WandB(Tracker):
    """Sends numbers, images and texts to Weights & Biases, or with `mode=offline` into the run folder, from where `wandb sync` sends them.

    Args:
        run_dir, config, run_name, step, close_timeout_s: as in `Tracker`; the client's own files go to `run_dir`/wandb.
        project: None: the config's `name`.
        entity: the user or team; None: the one that is logged in.
        mode: where the numbers go; None: as the environment says (`WANDB_MODE`), which is online.
        tags: for the run.
    """

    service, file = "W&B", "wandb"

    project: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None
    tags: Sequence[str] = ()

    def connect(self, run_id: str | None) -> int | None:
        """Open the run. We choose its id, and store it before W&B gets it."""
        import wandb

        if run_id is None:
            run_id = secrets.token_hex(4)
            self.remember(run_id)
        settings = wandb.Settings(
            console="off",  # stdout is the rank's
            silent=True,
            save_code=False,
            init_timeout=self.close_timeout_s if self.closing.is_set() else _INIT_S,
            finish_timeout=self.close_timeout_s,  # also for W&B's work when the process ends
            finish_timeout_raises=True,
        )
        (self.folder / "wandb").mkdir(exist_ok=True)  # else W&B takes another folder
        self.run = wandb.init(
            project=self.project or self.config["name"],
            entity=self.entity,
            mode=self.mode,
            tags=list(self.tags),
            config=self.config,
            name=self.run_name,
            group=self.group,
            dir=str(self.folder),
            id=run_id,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        return self.run.starting_step - 1 if self.run.resumed and not self.run.settings._offline else None

    def show(self, media: Media, step: int) -> None:
        import wandb

        if isinstance(media.content, str):
            content: Any = wandb.Html(f'<pre style="white-space: pre-wrap">{html.escape(media.content)}</pre>', inject=False)
        else:
            content = wandb.Image(media.content)
        self.run.log({media.name: content}, step=step)

    def finish(self) -> None:
        self.run.finish(exit_code=0)
