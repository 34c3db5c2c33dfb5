"""Compiled by its own code or not, a model has the same names in every file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.distributed.world import alone
from ddp_train.interfaces import Joint
from ddp_train.training.build.plain_names import use_plain_names
from ddp_train.training.state import initial_weights


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
