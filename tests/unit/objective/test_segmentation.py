"""Segmentation: every pixel that counts weighs the same, and the intersections over unions are those of the whole set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_train.objective.segmentation import Segmentation
from tests.unit.objective.batches import IDENTITY


def masks() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(3, (4, 6, 5))
    targets[:, 0] = 255
    return torch.randn(4, 3, 6, 5), targets


def test_ignored_pixels_count_nowhere() -> None:
    objective, (logits, targets) = Segmentation(ignore_index=255), masks()
    assert objective.weight((logits, targets)) == 4 * 5 * 5
    inner = (logits[:, :, 1:], targets[:, 1:])
    assert objective.loss(IDENTITY, (logits, targets)).item() == pytest.approx(F.cross_entropy(*inner, reduction="sum").item())
    totals = objective.score(IDENTITY, (logits, targets))
    found = objective.metrics({name: value.tolist() for name, value in totals.items()})
    says, there = inner[0].argmax(dim=1), inner[1]
    ious = [((says == k) & (there == k)).sum() / ((says == k) | (there == k)).sum() for k in range(3)]
    assert found["mean_iou"] == pytest.approx(float(sum(ious) / 3))
    assert found["accuracy"] == pytest.approx(float((says == there).float().mean()))
    assert found["loss"] == pytest.approx(F.cross_entropy(*inner).item())


def test_without_ignored_pixels_the_weight_is_known_from_the_shape() -> None:
    logits, targets = masks()
    assert Segmentation().weight((logits, targets.clamp(max=2))) == 120
    with pytest.raises(IndexError):  # 255 is a class that there is not, and no pixel to be left out in silence
        Segmentation().loss(IDENTITY, (logits, targets))


def test_small_logits_are_resized_to_the_masks() -> None:
    objective, (logits, targets) = Segmentation(ignore_index=255), masks()
    small = logits[:, :, :3, :3]
    assert objective.loss(IDENTITY, (small, targets)).isfinite()
    assert objective.score(IDENTITY, (small, targets))["predicted"].sum() == 100


class _OfPlanes(TorchDispatchMode):
    """Fails where CUDA has no deterministic kernel: the cross entropy of [B, K, H, W]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "nll_loss2d" not in str(func)
        return func(*args, **(kwargs or {}))


def test_what_must_be_deterministic_uses_no_kernel_that_is_not_on_a_gpu() -> None:
    logits, targets = masks()
    objective = Segmentation(ignore_index=255)
    plain, (sums, rows) = objective.total_loss(logits, targets), objective.measure(logits, targets)
    torch.use_deterministic_algorithms(True)
    try:
        with _OfPlanes():
            wanted = logits.clone().requires_grad_()
            objective.total_loss(wanted, targets).backward()
            same_sums, same_rows = objective.measure(logits, targets)
            assert torch.allclose(objective.total_loss(logits, targets), plain)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.allclose(same_sums[name], value) for name, value in sums.items())
    assert all(torch.allclose(same_rows[name], value) for name, value in rows.items())
