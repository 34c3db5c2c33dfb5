"""TensorBoard: the same scalars, the config as text, hyper-parameters for comparing runs, and pictures."""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_train.model_log import values_of

_MAX_NAME_BYTES = 200  # bytes; a file name may have 255


class TensorBoard:
    """Writes event files below the run folder's `tensorboard/`; if they cannot be written, it says so and stops until the next start.

    The folder is made at once. A thread imports the SummaryWriter, which takes 70 ms of Python; the first record raises its error.

    Args:
        config: the run's whole config, shown as text.
        hyper_parameters: the values by which runs are compared: typed ones, and those that a sweep varies.
        run_name: of a sweep's job, its values that differ from other jobs'; TensorBoard knows runs by their folders alone.
        step: the step that this attempt begins at; events after it are purged.
    """

    def __init__(
        self,
        run_dir: str,
        config: Mapping[str, Any],
        hyper_parameters: Mapping[str, bool | int | float | str] | None = None,
        run_name: str = "",
        step: int = 0,
    ) -> None:
        name = re.sub(r"[/\0]", "_", run_name).encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        self._folder = folder = Path(run_dir) / "tensorboard" / name
        self._purged_from = step + 1 if folder.exists() else None
        self._config = config if step == 0 else None
        self._hyper_parameters = dict(hyper_parameters or {})
        self._last: dict[str, float] = {}
        self._has_given_up = False
        folder.mkdir(parents=True, exist_ok=True)
        opening = ThreadPoolExecutor(1, "tensorboard-opening")
        self._writer = opening.submit(self._open)
        opening.shutdown(wait=False)

    def write(self, record: Mapping[str, Any]) -> None:
        values = values_of(record)
        self._last |= values
        if self._has_given_up:
            return
        writer = self._writer.result()
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # One event for all of them: `add_scalar` makes one of each, and takes ten times as long.
        summary = Summary(value=[{"tag": name, "simple_value": value} for name, value in values.items()])
        try:
            writer._get_file_writer().add_summary(summary, record["step"])
        except OSError as error:  # an earlier event's: TensorBoard writes in a thread
            self._has_given_up = True
            print(f"TensorBoard's files cannot be written ({error.strerror}) and end here; metrics.jsonl has everything", flush=True)

    def write_image(self, name: str, image: Tensor, step: int) -> None:
        if not self._has_given_up:
            self._writer.result().add_image(name, as_pixels(image), step, dataformats="HWC")

    def write_text(self, name: str, text: str, step: int) -> None:
        if not self._has_given_up:
            self._writer.result().add_text(name, text, step)

    def close(self) -> None:
        """Write the hyper-parameters with the last values (SummaryWriter.add_hparams would open a second run), and close."""
        if self._has_given_up:
            return
        writer = self._writer.result()
        from torch.utils.tensorboard.summary import hparams

        metrics = {name: value for name, value in self._last.items() if name.startswith("eval/")}
        for summary in hparams(self._hyper_parameters, metrics):
            writer._get_file_writer().add_summary(summary)
        writer.close()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._folder), purge_step=self._purged_from, flush_secs=30)
        if self._config is not None:
            writer.add_text("config", f"```\n{json.dumps(self._config, indent=2, default=str)}\n```")
        return writer


def as_pixels(image: Tensor) -> NDArray[np.uint8]:
    """Return a picture [C, H, W] as bytes [H, W, C], a copy; floats are clamped to [0, 1], and NaN is black."""
    if image.is_floating_point():
        image = image.float().nan_to_num(nan=0.0).clamp(0, 1).mul(255).round()
    return np.array(image.to(torch.uint8).permute(1, 2, 0).numpy(), order="C")
