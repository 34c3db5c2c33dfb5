"""Inputs and outputs of an image model, at every evaluation.

Shapes: B samples, C channels, H height, W width, K classes.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_train.interfaces import Callback, Run
from ddp_train.interfaces.batch import tensors_of


class SampleImages(Callback):
    """Logs the first evaluation images and the model's outputs for them: images as images, class scores as a text.

    Rank 0 alone does so, on its share of the evaluation data. Random streams stay as they were.

    Args:
        count: number of images, side by side.
    """

    def __init__(self, count: int = 16) -> None:
        self._count = count
        self._batch: Any = None

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        if run.rank != 0 and not run.forward_is_collective:
            return
        is_first, batch = self._batch is None, run.evaluation_batch() if self._batch is None else self._batch
        images_BCHW = next((tensor for tensor in tensors_of(batch) if _are_images(tensor)), None)
        if images_BCHW is None:
            raise ValueError("the evaluation data has no images [B, C, H, W] with C 1 or 3")
        self._batch, images_BCHW = batch, images_BCHW[: self._count]
        if is_first:
            run.log_image("samples/inputs", grid(images_BCHW))
        if isinstance(batch, (tuple, list)) and _are_images(batch[0]):
            with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
                outputs = run.model(batch[0][: self._count])
            self._log_outputs(run, outputs, batch[1] if len(batch) > 1 else None)

    def _log_outputs(self, run: Run, outputs: Any, targets: Any) -> None:
        outputs = next(tensors_of(outputs), None)
        if _are_images(outputs):
            run.log_image("samples/outputs", grid(outputs))
        elif isinstance(outputs, Tensor) and outputs.ndim == 2:
            has_classes = isinstance(targets, Tensor) and targets.ndim == 1
            lines = ["| image | predicted | target |", "|---|---|---|"]
            for number, predicted in enumerate(outputs.argmax(dim=1).tolist()):
                lines.append(f"| {number} | {predicted} | {int(targets[number]) if has_classes else ''} |")
            run.log_text("samples/predictions", "\n".join(lines))


def grid(images_BCHW: Tensor) -> Tensor:
    """Return the images side by side as one [C, H, W], each from its darkest to its brightest value in [0, 1]."""
    images_BCHW = images_BCHW.detach().float().cpu()
    low, high = images_BCHW.amin((1, 2, 3), keepdim=True), images_BCHW.amax((1, 2, 3), keepdim=True)
    images_BCHW = (images_BCHW - low) / (high - low).clamp(min=1e-12)
    count, channels, height, width = images_BCHW.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = torch.zeros(rows * columns, channels, height, width)
    sheet[:count] = images_BCHW
    return sheet.reshape(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


def _are_images(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] in (1, 3)
