"""trackio. Needs `pip install "ddp-train[trackio]"`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ddp_train.metrics.tracker import Media, Tracker, require

require("trackio")


@dataclass(kw_only=True, eq=False)
class Trackio(Tracker):
    """Writes numbers, images and texts into trackio's files on this machine, or sends them to a Space of Hugging Face.

    Args:
        run_dir, config, run_name, step, close_timeout_s: as in `Tracker`.
        project: None: the config's `name`.
        space_id: the Space, as `user/name`; None: as the environment says (`TRACKIO_SPACE_ID`), else this machine (`TRACKIO_DIR`).
    """

    service, file = "trackio", "trackio"

    project: str | None = None
    space_id: str | None = None

    def connect(self, run_id: str | None) -> int | None:
        """Open the run. trackio identifies a run by its name, so the name must be unique."""
        import trackio

        if run_id is None:
            run_id = f"{self.run_name}-{secrets.token_hex(3)}"
            self.remember(run_id)
        self.run = trackio.init(
            project=self.project or self.config["name"],
            name=run_id,
            space_id=self.space_id,
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
