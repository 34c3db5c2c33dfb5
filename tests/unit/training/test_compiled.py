"""Compiled or not, a model has the same names in every file, and ranks that compile have a cache each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import World, alone
from ddp_train.interfaces import Joint
from ddp_train.training import initial_weights
from ddp_train.training.compiled import compile_model, use_plain_names
from tests.unit.parts import components


class Wrapped(nn.Module):
    """Has the names that torch.compile gives to a module that it wraps, without its minutes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def parts() -> nn.Module:
    """Return a model of which one layer is wrapped, in which there is a buffer."""
    torch.manual_seed(0)
    return nn.ModuleDict({"stem": nn.Linear(2, 2), "body": Wrapped(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))})


PLAIN = [
    *("stem.weight", "stem.bias", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"),
    *("body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"),
]


@pytest.mark.parametrize("make", [parts, lambda: Wrapped(parts())])
def test_a_model_that_compiles_itself_has_plain_names_in_its_state(make: Any) -> None:
    model, other = make(), make()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    for each in (model, other):
        use_plain_names(each)
    state = model.state_dict()
    assert list(state) == PLAIN
    assert state._metadata["body.1"] == {"version": 2}
    assert other.load_state_dict(state) == ([], [])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.state_dict().values(), state.values(), strict=True))
    joint = Joint(other, nn.Linear(1, 1))  # type: ignore[arg-type]
    assert list(joint.state_dict())[: len(PLAIN)] == [f"model.{name}" for name in PLAIN]
    joint.load_state_dict(joint.state_dict())


def test_a_model_without_such_names_is_left_alone() -> None:
    model = nn.Linear(1, 1)
    use_plain_names(model)
    assert not model._state_dict_hooks


def test_weights_that_were_saved_compiled_are_taken(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    torch.save({"module._orig_mod.0.weight": torch.ones(2, 2), "module._orig_mod.0.bias": torch.ones(2)}, tmp_path / "weights.pt")
    initial_weights.load(tmp_path / "weights.pt", model, alone(), renames={"module.": ""}, is_strict=True)
    assert all((parameter == 1).all() for parameter in model.parameters())


def test_each_local_rank_compiles_into_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")  # so that it is put back
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    world = World(rank=5, size=8, local_rank=1, local_size=4, device=torch.device("cpu"))
    model = nn.Linear(1, 1)
    for _ in range(2):  # two parts of a model
        compile_model(model, world)
    assert compiled == [model, model]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/cache/local_rank_1"
    assert int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) >= 1
    compile_model(model, alone("meta"))
    assert compiled == [model, model]


def test_compile_is_a_key_and_the_model_is_compiled_before_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))
    made = components("compile=true")
    assert compiled == [made.model]
    assert components().model is not compiled[-1]
