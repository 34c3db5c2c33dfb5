"""trackio. Needs `pip install "ddp-train[trackio]"`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ddp_train.metrics.tracker import Media, Tracker, require

require("trackio")


class Trackio(Tracker):
    """Writes numbers, images and texts into trackio's files on this machine, or sends them to a Space of Hugging Face.

    Args:
        run_dir, config, run_name, step, close_timeout_s: as in `Tracker`.
        project: None: the config's `name`.
        space_id: the Space, as `user/name`; None: as the environment says (`TRACKIO_SPACE_ID`), else this machine (`TRACKIO_DIR`).
    """

    service, file = "trackio", "trackio"

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
        self._space_id = space_id
        super().__init__(run_dir, config, run_name=run_name, step=step, project=project, close_timeout_s=close_timeout_s)

    def connect(self, run_id: str | None) -> int | None:
        """Open the run. trackio identifies a run by its name, so the name must be unique."""
        import trackio

        if run_id is None:
            run_id = f"{self.run_name}-{secrets.token_hex(3)}"
            self.remember(run_id)
        self.run = trackio.init(
            project=self.project,
            name=run_id,
            space_id=self._space_id,
            config=self.config,
            group=self.group,
            resume="allow",
            embed=False,
        )
        return None

    def show(self, media: Media, step: int) -> None:
        import trackio

        content = trackio.Markdown(media.content) if isinstance(media.content, str) else trackio.Image(media.content)
        self.run.log({media.name: content}, step=step)

    def finish(self) -> None:
        self.run.finish()
