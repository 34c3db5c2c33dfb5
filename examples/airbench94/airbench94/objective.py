"""Test-time augmentation: a model's answer for an image is the mean of those for several views of it.

Shapes: B samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ddp_train.interfaces import Batch, Evaluated
from ddp_train.objective.classification import Classification

Views = Literal["mirror", "mirror_translate"]


class SeveralViews(Classification):
    """Classification, by the mean of the logits over several views wherever the model is not trained.

    Args:
        test_views: "mirror": an image and its mirror image; "mirror_translate": half of the answer is theirs, and half that of both moved
            by one pixel up and left, and down and right; what comes in at the border is the image mirrored there.
        label_smoothing: as for `Classification`.

    Source: Jordan 2024, arXiv:2404.00498, section 3.5.
    """

    def __init__(self, *, test_views: Views = "mirror_translate", label_smoothing: float = 0.0) -> None:
        if test_views not in ("mirror", "mirror_translate"):
            raise ValueError(f"test_views is {test_views!r}, and mirror or mirror_translate is needed")
        super().__init__(label_smoothing=label_smoothing)
        self.test_views = test_views

    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Return what an evaluation reports, saves and compares."""
        return super().evaluate(MeanOverViews(model, self.test_views), batch)

    def infer(self, model: nn.Module, inputs: Any) -> Mapping[str, Tensor]:
        """Return what the model says of each sample."""
        return super().infer(MeanOverViews(model, self.test_views), inputs)


class MeanOverViews(nn.Module):
    """Calls a model once for each view, and returns the mean of its logits."""

    def __init__(self, model: nn.Module, views: Views) -> None:
        super().__init__()
        self.model, self.views = model, views

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits, shape [B, K]."""
        here_BK = self._both_sides(images_BCHW)
        if self.views == "mirror":
            return here_BK
        H, W = images_BCHW.shape[2:]
        padded_BCHW = pad(images_BCHW, (1, 1, 1, 1), mode="reflect")
        moved = [self._both_sides(padded_BCHW[:, :, shift : shift + H, shift : shift + W]) for shift in (0, 2)]
        return 0.5 * here_BK + 0.5 * torch.stack(moved).mean(dim=0)

    def _both_sides(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = 0.5 * self.model(images_BCHW) + 0.5 * self.model(images_BCHW.flip(3))
        return logits_BK
