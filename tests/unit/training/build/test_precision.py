"""Each option of `precision` does what it says, and `amp=auto` is what every rank's device has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train import amp
from ddp_train.distributed.world import World, alone
from ddp_train.rank import isolation
from ddp_train.training.build.build import build
from ddp_train.training.build.precision import shared_dtype
from ddp_train.training.state.saved_state import load
from ddp_train.training.train_state import TrainState
from tests.conftest import TINY_CONVNET
from tests.unit.parts import checked, components, saved, trainer


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    matmul, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    newer = isolation._take_precisions()
    isolation._set_precisions(newer)
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.benchmark = benchmark
    isolation._set_precisions(newer)


def test_products_of_float32_are_as_precise_as_the_config_says() -> None:
    components()
    assert torch.get_float32_matmul_precision() == "highest"
    components("precision.float32_matmul_precision=medium")
    assert torch.get_float32_matmul_precision() == "medium"


def test_cudnn_measures_where_the_config_says_so() -> None:
    components("precision.cudnn_benchmark=true")
    assert torch.backends.cudnn.benchmark is True
    components()
    assert torch.backends.cudnn.benchmark is False


def test_channels_last_weights_give_channels_last_images() -> None:
    model = components("precision.channels_last=true", base=TINY_CONVNET).model
    weight = model.get_submodule("conv1").weight
    assert isinstance(weight, torch.Tensor)
    image: torch.Tensor = model.get_submodule("conv1")(torch.zeros(2, weight.shape[1], 8, 8))
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert not components(base=TINY_CONVNET).model.get_submodule("conv1").weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator]


@pytest.mark.parametrize("before", ["true", "false"])
def test_channels_last_resumes_bitwise_and_from_a_run_without(before: str, tmp_path: Path) -> None:
    options = ["precision.channels_last=true", "optimizer.lr=0.01"]

    def steps(parts: Any, state: TrainState, number: int) -> None:
        parts.total_steps = number
        trainer(parts, state).train()

    whole = components(*options, base=TINY_CONVNET)
    steps(whole, TrainState(), 4)
    half, state = components(*options, f"precision.channels_last={before}", base=TINY_CONVNET), TrainState()
    steps(half, state, 2)
    file = saved(tmp_path, 2, half)
    again, there = components(*options, "seed=5", base=TINY_CONVNET), TrainState()
    load(file, again, there, alone())
    there.step, there.samples = state.step, state.samples
    again.train_loader = half.train_loader
    steps(again, there, 4)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        near = {"rtol": 0, "atol": 0} if before == "true" else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(mine, theirs, **near)  # type: ignore[arg-type]
    for mine in again.model.parameters():
        assert all(value.stride() == mine.stride() for value in again.optimizer.state[mine].values() if value.shape == mine.shape)


class Worlds(World):
    """Has other ranks, whose devices are as it is told."""

    others: list[str | None]

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_auto_is_bfloat16_where_every_rank_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or True)
    assert amp.best_dtype(torch.device("cuda")) == "bfloat16"
    assert asked == [False]  # in hardware
    assert amp.best_dtype(torch.device("cpu")) is None
    world = Worlds(rank=0, size=3, local_rank=0, local_size=3, device=torch.device("cuda"))
    object.__setattr__(world, "others", ["bfloat16", "bfloat16"])
    assert shared_dtype(world) == "bfloat16"
    object.__setattr__(world, "others", ["bfloat16", None])
    assert shared_dtype(world) is None


def test_auto_is_the_default_and_its_answer_is_recorded_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components()
    assert parts.amp.dtype is None  # type: ignore[attr-defined]
    assert parts.answers["amp.dtype"] is None
    monkeypatch.setattr("ddp_train.training.build.precision.best_dtype", lambda device: "bfloat16")
    parts = components()
    assert parts.amp.dtype is torch.bfloat16  # type: ignore[attr-defined]
    config = checked()
    text = config.yaml({"amp.dtype": parts.answers["amp.dtype"]})
    assert "dtype: bfloat16" in text and "- amp.dtype" in text
    assert build(checked("amp=off"), alone()).amp.dtype is None  # type: ignore[attr-defined]
