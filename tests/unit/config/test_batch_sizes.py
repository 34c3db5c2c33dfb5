"""micro-batch x ranks x accumulation = global batch: one of them follows from the others, or they do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_train.config.batch_sizes import BatchSizes, derive_batch_sizes
from ddp_train.config.run_config import RunConfig
from ddp_train.errors import ConfigError
from tests.unit.parts import checked


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return checked()


def derived(run: RunConfig, total: int | None, ranks: int, accumulation: int | None) -> BatchSizes:
    """Return what is derived from micro-batches of eight."""
    trainer = replace(run.trainer, global_batch_size=total, grad_accum_steps=accumulation)
    return derive_batch_sizes(trainer, replace(run.loader, micro_batch_size=8), replace(run.cluster, processes_per_node=ranks))


@pytest.mark.parametrize(
    ("total", "ranks", "accumulation", "said"),
    [
        (None, 3, None, "global batch 24 = micro-batch 8 x 3 ranks x accumulation 1"),
        (None, 1, 4, "global batch 32 = micro-batch 8 x 1 rank x accumulation 4"),
        (64, 2, None, "global batch 64 = micro-batch 8 x 2 ranks x accumulation 4"),
        (50, 3, None, "global batch 50 <= micro-batch 6 x 3 ranks x accumulation 3"),  # the micro-batch is no larger than it has to be
    ],
)
def test_what_is_not_given_follows_from_the_rest(
    run: RunConfig, total: int | None, ranks: int, accumulation: int | None, said: str
) -> None:
    assert str(derived(run, total, ranks, accumulation)) == said


@pytest.mark.parametrize(
    ("total", "accumulation", "said"), [(2, None, "2 is smaller than the world size 3"), (48, 3, "8 x 3 ranks x accumulation 3 = 72")]
)
def test_a_contradiction_is_refused(run: RunConfig, total: int, accumulation: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        derived(run, total, 3, accumulation)
    assert raised.value.key == "trainer.global_batch_size"
    assert said in raised.value.happened


@pytest.mark.parametrize(("ranks", "accumulation", "micro"), [(1, 8, 8), (3, 3, 8), (16, 1, 4), (64, 1, 1)])
def test_on_another_number_of_ranks_the_global_batch_stays(run: RunConfig, ranks: int, accumulation: int, micro: int) -> None:
    before = replace(run, batch=derived(run, 64, 2, None), loader=replace(run.loader, micro_batch_size=8))
    after = before.on(ranks)
    assert (after.batch.global_batch_size, after.batch.grad_accum_steps, after.batch.micro_batch_size) == (64, accumulation, micro)
    assert after.batch == derived(run, 64, ranks, None)
    assert (after.trainer.grad_accum_steps, before.on(2)) == (accumulation, before)


def test_more_ranks_than_samples_in_a_batch_are_refused(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="smaller than the world size 65"):
        replace(run, batch=derived(run, 64, 2, None)).on(65)
