"""Mixup and CutMix: a function of the sample alone, with targets that say how much of each image there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.errors import ConfigError, DataError
from ddp_train.hashing import mix
from ddp_train.loader.blend import Blend, beta
from tests.unit.parts import components, trainer

B = 400
KEYS = mix(np.arange(B, dtype=np.uint64))


def batches() -> tuple[Any, Any]:
    """Return black images of class 0, and white ones of class 1."""
    return (torch.zeros(B, 1, 16, 16), torch.zeros(B, dtype=torch.int64)), (torch.ones(B, 1, 16, 16), torch.ones(B, dtype=torch.int64))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, None), (None, 1.0), (0.4, 1.0)])
def test_the_target_says_how_much_of_each_image_there_is(mixup: float | None, cutmix: float | None) -> None:
    images, targets = Blend(num_classes=3, mixup_alpha=mixup, cutmix_alpha=cutmix)(*batches(), KEYS)
    whiteness = images.mean(dim=(1, 2, 3))
    torch.testing.assert_close(targets, torch.stack([1 - whiteness, whiteness, torch.zeros(B)], dim=1))
    assert 0.25 < whiteness.mean() < 0.55 and whiteness.std() > 0.1  # a box that is cut off at a side is smaller
    kinds = [set(image.unique().tolist()) <= {0.0, 1.0} for image in images]
    assert sum(kinds) / B == pytest.approx(0.5 if mixup and cutmix else float(mixup is None), abs=0.1)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_have_the_distribution_that_was_asked_for(alpha: float) -> None:
    found, drawn = beta((np.arange(20_000) + 0.5) / 20_000, alpha), np.random.default_rng(0).beta(alpha, alpha, 20_000)
    assert found.mean() == pytest.approx(0.5, abs=1e-6) and found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-3)
    for quantile in (0.05, 0.3, 0.8):
        assert np.quantile(found, quantile) == pytest.approx(np.quantile(drawn, quantile), abs=0.02)


def test_batches_of_another_form_are_refused() -> None:
    blend = Blend(num_classes=3, mixup_alpha=None, cutmix_alpha=1.0)
    with pytest.raises(DataError, match=r"loader\.cutmix_alpha: is given, and a batch is float32 \[2, 5\]"):
        blend(*[(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))] * 2, KEYS[:2])
    with pytest.raises(DataError, match="float inputs"):
        blend(*[{"image": torch.zeros(2, 1, 4, 4)}] * 2, KEYS[:2])
    own = ["data=custom", "data._target_=tests.unit.loader.test_blend.Bare", "model=mlp"]
    with pytest.raises(ConfigError, match=r"loader\.mixup_alpha: is given, and the data does not say how many classes"):
        components("loader.mixup_alpha=0.2", base=[*own, "model.image_shape=[3,1,1]", "model.num_classes=2"])


class Bare:
    """A data set that says nothing of itself."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), 0


BLENDED = ["loader.mixup_alpha=0.4", "loader.cutmix_alpha=1.0", "trainer.global_batch_size=16"]


def test_a_sample_looks_the_same_in_any_micro_batch_and_again_when_it_is_read_again() -> None:
    def first(size: int) -> list[torch.Tensor]:
        loader = components(*BLENDED, f"loader.micro_batch_size={size}").train_loader
        stream = loader.micro_batches(32)
        return [torch.cat(each) for each in zip(*(next(stream).batch for _ in range(loader.grad_accum_steps)), strict=True)]

    whole, parts = first(16), first(4)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
    assert whole[1].shape == (16, 10) and ((whole[1] > 0).sum(dim=1) == 2).any()


def test_blended_samples_are_trained_on_and_the_evaluation_has_them_as_they_are() -> None:
    run = trainer(components(*BLENDED, "trainer.max_steps=2"), sanity_check=True)
    assert run.train()
    plain = trainer(components(*BLENDED[2:], "trainer.max_steps=2"))
    assert plain.train()
    assert run.services.records.last_values["train/loss"] != plain.services.records.last_values["train/loss"]
    assert run.components.eval_loader is not None
    assert all(each.batch[1].ndim == 1 for each in run.components.eval_loader)


def test_in_an_epoch_each_sample_goes_with_one_and_in_the_next_with_another() -> None:
    order: Any = components().train_loader.order
    positions = np.arange(order.epoch_size)
    pairs = [np.stack([order.indices(epoch, 0, order.epoch_size), order.partners(epoch, positions)[0]]) for epoch in (0, 1)]
    assert all(sorted(mine) == sorted(others) and not (mine == others).any() for mine, others in pairs)
    assert {tuple(pair) for pair in pairs[0].T} != {tuple(pair) for pair in pairs[1].T}
