"""Each option of `precision` does what it says, and `amp=auto` is what every rank's device has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train import amp
from ddp_train.distributed.world import World, alone
from ddp_train.training.build.build import build
from ddp_train.training.build.model import make_without_values, shared_dtype
from ddp_train.training.seeding import seed_all
from ddp_train.training.state.initial_weights import load_initial_weights
from ddp_train.training.state.saved_state import start_from
from ddp_train.training.train_state import TrainState
from tests.conftest import TINY_CONVNET
from tests.unit.parts import checked, components, saved, trainer
from tests.unit.rig.cases import _SMALL, model

_PRECISIONS = (  # (backend, operation) of `torch.backends.fp32_precision` and its kin, the general ones before those that follow them
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)


def _own_precisions() -> list[str]:
    """Return what each has of its own, and take it away: one that has nothing answers with a more general one's."""
    found: list[str] = []
    for place in _PRECISIONS:
        found.append(torch._C._get_fp32_precision_getter(*place))
        torch._C._set_fp32_precision_setter(*place, "none")
    return found


def _set_precisions(values: list[str]) -> None:
    for place, value in zip(_PRECISIONS, values, strict=True):
        torch._C._set_fp32_precision_setter(*place, value)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    matmul, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    newer = _own_precisions()
    _set_precisions(newer)
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.benchmark = benchmark
    _set_precisions(newer)


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
        trainer(replace(parts, total_steps=number), state).train()

    whole = components(*options, base=TINY_CONVNET)
    steps(whole, TrainState(), 4)
    half, state = components(*options, f"precision.channels_last={before}", base=TINY_CONVNET), TrainState()
    steps(half, state, 2)
    file = saved(tmp_path, 2, half)
    again, there = components(*options, "seed=5", base=TINY_CONVNET), TrainState()
    start_from(file, again, there, alone())
    there.step, there.position = state.step, state.position
    again = replace(again, train_loader=half.train_loader)
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
    monkeypatch.setattr("ddp_train.training.build.model.best_dtype", lambda device: "bfloat16")
    parts = components()
    assert parts.amp.dtype is torch.bfloat16  # type: ignore[attr-defined]
    config = checked()
    text = config.yaml({"amp.dtype": parts.answers["amp.dtype"]})
    assert "dtype: bfloat16" in text and "- amp.dtype" in text
    assert build(checked("amp=off"), alone()).amp.dtype is None  # type: ignore[attr-defined]


def test_weights_that_were_saved_compiled_are_taken(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    torch.save({"module._orig_mod.0.weight": torch.ones(2, 2), "module._orig_mod.0.bias": torch.ones(2)}, tmp_path / "weights.pt")
    load_initial_weights(tmp_path / "weights.pt", model, alone(), renames={"module.": ""}, is_strict=True)
    assert all((parameter == 1).all() for parameter in model.parameters())


class Made(nn.Linear):
    """Does something more when it is made."""

    def __init__(self, more: Callable[[Any], None]) -> None:
        super().__init__(4, 4)
        more(self)


class OwnKind(nn.Parameter):
    """A parameter that is more than one."""


OTHERS: dict[str, Callable[[Any], Any]] = {
    "reads a value": lambda made: setattr(made, "scale", float(made.weight.std())),
    "keeps a tensor": lambda made: setattr(made, "table", torch.arange(4)),
    "keeps one in a list": lambda made: setattr(made, "tables", [torch.arange(4)]),
    "draws on a device that it names": lambda made: made.register_buffer("noise", torch.rand(4, device="cpu")),
    "parameters of another class": lambda made: setattr(made, "weight", OwnKind(made.weight.data)),
    "fails": lambda made: 1 // 0,
}
SAME: dict[str, Callable[[Any], Any]] = {
    "a buffer": lambda made: made.register_buffer("table", torch.rand(4), persistent=False),
    "tied": lambda made: setattr(made, "again", made.weight),
    "a parameter of its own": lambda made: setattr(made, "token", nn.Parameter(torch.randn(1, 4) * 0.02)),
    "initialised anew": lambda made: nn.init.orthogonal_(made.weight),
}


def made(more: Callable[[Any], Any]) -> nn.Module | None:
    def make() -> nn.Module:
        seed_all(0)
        return Made(more)

    return make_without_values(make)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_would_be_another_one_is_made_with_values(name: str) -> None:
    assert made(OTHERS[name]) is None


@pytest.mark.parametrize("name", SAME)
def test_parameters_and_buffers_need_no_values(name: str) -> None:
    found = made(SAME[name])
    assert found is not None
    assert all(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))


@pytest.mark.parametrize("name", _SMALL)
def test_our_models_need_none(name: str) -> None:
    def make() -> nn.Module:
        seed_all(0)
        return model(name)

    found = make_without_values(make)
    assert found is not None and any(parameter.is_meta for parameter in found.parameters())
