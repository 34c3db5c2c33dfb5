"""Test-time augmentation: a model's answer for an image is the mean of those for several views of it.

Shapes: B samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ddp_train.errors import ConfigError
from ddp_train.interfaces import describe
from ddp_train.objective.model_call import unwrap

Kind = Literal["mirror", "mirror_translate"]
KINDS: tuple[Kind, ...] = ("mirror", "mirror_translate")


class Views(nn.Module):
    """Calls a model once for each view of its first input, and returns the mean of its outputs.

    Args:
        model: gives one row for each image.
        kind: "mirror": an image and its mirror image; "mirror_translate": half of the answer is theirs, and half that of both moved by one
            pixel up and left, and down and right; what comes in at the border is the image mirrored there.

    Source: Jordan 2024, arXiv:2404.00498, section 3.5.
    """

    def __init__(self, model: nn.Module, kind: Kind) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return the mean of the outputs, shape [B, K].

        Raises:
            ConfigError: the first input is not images.
        """
        images_BCHW = inputs[0] if inputs else next(iter(named.values()))
        if not isinstance(images_BCHW, Tensor) or images_BCHW.ndim != 4:
            raise ConfigError(
                key="objective.test_views",
                happened=f"is {self.kind}, and the model's first input is {describe(images_BCHW)}",
                expected="images [B, C, H, W]",
                fix="objective.test_views=null",
            )

        def answer(view_BCHW: Tensor) -> Tensor:
            given = self.model(view_BCHW, *inputs[1:], **named) if inputs else self.model(**{**named, next(iter(named)): view_BCHW})
            return unwrap(given)[0]

        def both_sides(view_BCHW: Tensor) -> Tensor:
            return 0.5 * answer(view_BCHW) + 0.5 * answer(view_BCHW.flip(3))

        here_BK = both_sides(images_BCHW)
        if self.kind == "mirror":
            return here_BK
        H, W = images_BCHW.shape[2:]
        padded_BCHW = pad(images_BCHW, (1, 1, 1, 1), mode="reflect")
        moved = [both_sides(padded_BCHW[:, :, shift : shift + H, shift : shift + W]) for shift in (0, 2)]
        return 0.5 * here_BK + 0.5 * torch.stack(moved).mean(dim=0)
