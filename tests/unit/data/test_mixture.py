"""`data=mixture` from what is typed to what is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from ddp_train.errors import ConfigError, ConfigErrors
from ddp_train.training.train_state import TrainState
from tests.unit.parts import checked, components, trainer

_IMAGES = "_target_: ddp_train.data.synthetic_images.SyntheticImages, image_size: 8, seed: 1"
SOURCES = [
    f"+data.sources.clean={{weight: 3, data: {{{_IMAGES}, num_samples: 300}}}}",
    f"+data.sources.noisy={{weight: 1, data: {{{_IMAGES}, num_samples: 20, noise: 2.0}}}}",
]
MIXTURE = ["data=mixture", "model=mlp", "model.width=8", "loader.micro_batch_size=16", "trainer.max_steps=6", "trainer.max_epochs=null"]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def run(state: TrainState | None = None, *overrides: str) -> tuple[list[dict[str, Any]], torch.Tensor]:
    records: list[dict[str, Any]] = []
    parts = components(*SOURCES, *overrides, base=MIXTURE)
    trainer(parts, state, write=records.append).train()
    return records, torch.cat([parameter.detach().flatten() for parameter in parts.model.parameters()])


def test_a_mixture_is_trained_on_by_its_weights_and_each_source_is_counted() -> None:
    changes = "data.eval={sources: {noisy: null, clean: {data: {split: eval, num_samples: 33}}}}"
    records, _ = run(None, "trainer.log_every_steps=1")
    last = records[-1]
    assert last["samples/clean"] + last["samples/noisy"] == last["samples"] == 96
    assert 60 <= last["samples/clean"] <= 84 and records[0]["samples/clean"] <= 16
    parts = components(*SOURCES, changes, base=MIXTURE)
    assert parts.eval_loader is not None
    assert sum(len(each.batch[1]) for each in parts.eval_loader) == 33  # every sample of what is left, once


def test_ranks_and_micro_batches_change_nothing_of_the_order() -> None:
    parts = [components(*SOURCES, f"loader.micro_batch_size={size}", "trainer.global_batch_size=16", base=MIXTURE) for size in (16, 4)]
    order = [
        np.concatenate([each.train_loader.sample_ids(48, number) for number in range(each.train_loader.grad_accum_steps)]) for each in parts
    ]
    assert np.array_equal(*order) and (order[0] >= 300).any()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=mixture"], r"data\.sources: has no data set"),
        (["data=mixture", "+data.sources.a={wieght: 1}"], r"data\.sources\.a: has wieght"),
        ([*MIXTURE, *SOURCES, "data.sources.noisy.weight=0"], r"data\.sources\.noisy\.weight: is 0"),
        ([*MIXTURE, *SOURCES, "data.sources.noisy.data.image_size=4"], r"data\.sources\.noisy: has image_shape \(3, 4, 4\)"),
        ([*MIXTURE, *SOURCES, "+loader.sampler._target_=torch.utils.data.SequentialSampler"], r"loader\.sampler: is given"),
        (["data=mixture", f"+data.sources.s={{weight: 1, data: {{_target_: {__name__}.Endless}}}}"], r"sources\.s\.data: is a stream"),
    ],
)
def test_what_is_no_mixture_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        components(base=overrides)


def test_a_wrong_argument_of_a_source_is_told_with_its_key() -> None:
    with pytest.raises(ConfigErrors, match=r"data\.sources\.noisy\.data\.nois: .*has no argument 'nois'"):
        checked(*SOURCES, "+data.sources.noisy.data.nois=1", base=MIXTURE)
