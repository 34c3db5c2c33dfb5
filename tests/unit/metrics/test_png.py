"""PNG files that are made without a library are what others read."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from ddp_train.metrics.png import as_png

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_read_back_as_it_was(channels: int) -> None:
    image = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    found = np.asarray(Image.open(io.BytesIO(as_png(image)))).reshape(5, 7, channels)
    assert np.array_equal(found, image.permute(1, 2, 0).numpy())


def test_floats_are_clamped_and_what_is_no_number_is_black() -> None:
    picture = Image.open(io.BytesIO(as_png(torch.tensor([[[-1.0, 0.5, 2.0, float("nan")]]]))))
    assert np.asarray(picture).tolist() == [[0, 128, 255, 0]]
