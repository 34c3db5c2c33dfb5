"""Segmentation: every pixel that counts weighs the same, and the intersections over unions are those of the whole set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_train.interfaces.objective import loss_sum
from ddp_train.objective.segmentation import Segmentation
from tests.unit.objective.batches import IDENTITY, mean_loss, reported


def masks() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(3, (4, 6, 5))
    targets[:, 0] = 255
    return torch.randn(4, 3, 6, 5), targets


def test_ignored_pixels_count_nowhere() -> None:
    objective, (logits, targets) = Segmentation(ignore_index=255), masks()
    assert loss_sum(objective, IDENTITY, (logits, targets)).num_units == 4 * 5 * 5
    inner = (logits[:, :, 1:], targets[:, 1:])
    assert mean_loss(objective, IDENTITY, (logits, targets)) == pytest.approx(F.cross_entropy(*inner).item())
    found = reported(objective, IDENTITY, (logits, targets))
    says, there = inner[0].argmax(dim=1), inner[1]
    ious = [((says == k) & (there == k)).sum() / ((says == k) | (there == k)).sum() for k in range(3)]
    assert found["mean_iou"] == pytest.approx(float(sum(ious) / 3))
    assert found["accuracy"] == pytest.approx(float((says == there).float().mean()))
    assert found["loss"] == pytest.approx(F.cross_entropy(*inner).item())


def test_without_ignored_pixels_their_number_is_known_from_the_shape() -> None:
    logits, targets = masks()
    num_units = loss_sum(Segmentation(), IDENTITY, (logits, targets.clamp(max=2))).num_units
    assert type(num_units) is int and num_units == 120
    with pytest.raises(IndexError):  # 255 is a class that there is not, and no pixel to be left out in silence
        Segmentation().loss(IDENTITY, (logits, targets))


def test_small_logits_are_resized_to_the_masks() -> None:
    objective, (logits, targets) = Segmentation(ignore_index=255), masks()
    small = logits[:, :, :3, :3]
    large = F.interpolate(small, size=(6, 5), mode="bilinear", align_corners=False)
    assert reported(objective, IDENTITY, (small, targets)) == reported(objective, IDENTITY, (large, targets))
    assert mean_loss(objective, IDENTITY, (small, targets)) == mean_loss(objective, IDENTITY, (large, targets))


class _OfPlanes(TorchDispatchMode):
    """Fails where CUDA has no deterministic kernel: the cross entropy of [B, K, H, W]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "nll_loss2d" not in str(func)
        return func(*args, **(kwargs or {}))


def test_what_must_be_deterministic_uses_no_kernel_that_is_not_on_a_gpu() -> None:
    logits, targets = masks()
    objective = Segmentation(ignore_index=255)
    plain, metrics = mean_loss(objective, IDENTITY, (logits, targets)), reported(objective, IDENTITY, (logits, targets))
    torch.use_deterministic_algorithms(True)
    try:
        with _OfPlanes():
            wanted = logits.clone().requires_grad_()
            loss_sum(objective, IDENTITY, (wanted, targets)).total.backward()
            assert mean_loss(objective, IDENTITY, (logits, targets)) == pytest.approx(plain)
            assert reported(objective, IDENTITY, (logits, targets)) == pytest.approx(metrics)
    finally:
        torch.use_deterministic_algorithms(False)
