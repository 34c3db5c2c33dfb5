"""micro-batch x ranks x accumulation = global batch: one of them follows from the others, or they do not fit."""

from __future__ import annotations

import pytest

from ddp_train.config.check import ConfigErrors
from tests.unit.parts import checked


@pytest.mark.parametrize(
    ("total", "ranks", "accumulation", "said"),
    [
        ("null", 3, "null", "global batch 24 = micro-batch 8 x 3 ranks x accumulation 1"),
        ("null", 1, 4, "global batch 32 = micro-batch 8 x 1 rank x accumulation 4"),
        (64, 2, "null", "global batch 64 = micro-batch 8 x 2 ranks x accumulation 4"),
        (50, 3, "null", "global batch 50 <= micro-batch 6 x 3 ranks x accumulation 3"),  # the micro-batch is no larger than it has to be
    ],
)
def test_what_is_not_given_follows_from_the_rest(total: int | str, ranks: int, accumulation: int | str, said: str) -> None:
    sizes = [f"trainer.global_batch_size={total}", f"trainer.grad_accum_steps={accumulation}", "loader.micro_batch_size=8"]
    assert str(checked(*sizes, f"cluster.processes_per_node={ranks}", "data.num_samples=640").batch) == said


@pytest.mark.parametrize(
    ("total", "accumulation", "said"), [(2, "null", "2 is smaller than the world size 3"), (48, 3, "8 x 3 ranks x accumulation 3 = 72")]
)
def test_a_contradiction_is_refused(total: int, accumulation: int | str, said: str) -> None:
    sizes = [f"trainer.global_batch_size={total}", f"trainer.grad_accum_steps={accumulation}", "loader.micro_batch_size=8"]
    with pytest.raises(ConfigErrors) as raised:
        checked(*sizes, "cluster.processes_per_node=3")
    assert any(error.key == "trainer.global_batch_size" and said in error.happened for error in raised.value.errors)
