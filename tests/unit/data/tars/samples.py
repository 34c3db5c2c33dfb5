"""Samples in tars whose pixels and labels are numbers."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ddp_train.data.tar_shards import TarShards

Image = pytest.importorskip("PIL.Image")


def png(value: int = 0, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def numbered(*values: int) -> list[tuple[str, bytes]]:
    """The files of samples whose pixels and labels are these numbers."""
    return [file for value in values for file in ((f"{value:03d}.png", png(value)), (f"{value:03d}.cls", str(value).encode()))]


def labels(data: TarShards) -> list[int]:
    """Return all labels in order, read in another order, having checked that they are the pixels."""
    order = np.random.default_rng(0).permutation(len(data))
    images, found = data.batch(order)
    np.testing.assert_allclose(((images[:, 0, 0, 0] * 0.5 + 0.5) * 255).numpy(), found.numpy(), atol=1e-4)
    return found[np.argsort(order)].tolist()
