"""Weights to begin with: read from other people's files and from checkpoints, renamed, and never silently something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ddp_train.checkpoint.foreign_files import read_pickled
from ddp_train.distributed.world import alone
from ddp_train.errors import UserError
from ddp_train.training.state.initial_weights import load_initial_weights
from tests.unit.parts import components, saved


def model(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def load(path: Path, into: nn.Module, *, is_strict: bool = True, **renames: str) -> list[str]:
    return load_initial_weights(
        path, into, alone(), renames={name.replace("_", "."): new for name, new in renames.items()}, is_strict=is_strict
    )


def same(mine: nn.Module, theirs: nn.Module) -> bool:
    ours, others = mine.state_dict(), theirs.state_dict()
    return all(torch.equal(ours[name], others[name]) for name in ours)


def write(path: Path, weights: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights.pth"])
def test_files_of_weights_are_loaded(tmp_path: Path, name: str) -> None:
    theirs, mine = model(), model()
    path = write(tmp_path / name, theirs.state_dict())
    assert load(path, mine) == [f"weights  9 of 9 tensors from {path}"]
    assert same(mine, theirs)


def test_a_checkpoint_of_lightnings_is_loaded_and_the_prefix_of_its_module_is_replaced(tmp_path: Path) -> None:
    theirs, mine = model(), model()
    state = {f"net.{name}": value for name, value in theirs.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": Path("here"), "epoch": 3}, tmp_path / "theirs.ckpt")
    with pytest.raises(UserError, match=r"(?s)extra +net\..*'\+init_from_keys="):
        load(tmp_path / "theirs.ckpt", mine)
    load(tmp_path / "theirs.ckpt", mine, net_="")
    assert same(mine, theirs)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_one_level_below_are_found(tmp_path: Path, key: str) -> None:
    theirs, mine = model(), model()
    torch.save({key: theirs.state_dict(), "step": 7}, tmp_path / "weights.pt")
    load(tmp_path / "weights.pt", mine)
    assert same(mine, theirs)


def test_prefixes_are_replaced_the_longest_first(tmp_path: Path) -> None:
    theirs, mine = model(), model()
    renamed = {f"module.{'fc' + name[1:] if name[0] == '2' else name}": value for name, value in theirs.state_dict().items()}
    path = write(tmp_path / "weights.safetensors", renamed)
    load(path, mine, module_="", module_fc_="2.")
    assert same(mine, theirs)
    with pytest.raises(UserError, match=r"two tensors of .* would be called"):
        load(path, mine, module_="", module_fc_="0.")


def test_what_does_not_fit_is_listed_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    theirs, mine = model(classes=5), model()
    weights = {**theirs.state_dict(), "ema": torch.ones(1), "1.num_batches_tracked": torch.ones(())}
    del weights["0.bias"]
    path, before = write(tmp_path / "weights.safetensors", weights), {name: value.clone() for name, value in mine.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load(path, mine)
    for said in (
        "missing        0.bias",
        "extra          ema",
        "2.weight (float32 [5, 8] -> float32 [3, 8])",
        "another type   1.num_batches_tracked (float32 [] -> int64 [])",
    ):
        assert said in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())

    said = "\n".join(load(path, mine, is_strict=False))
    assert "5 of 9 tensors" in said
    assert "missing        0.bias" in said
    assert torch.equal(mine[0].weight, theirs[0].weight)
    assert torch.equal(mine[2].weight, before["2.weight"])
    with pytest.raises(UserError, match="does not fit"):
        load(write(tmp_path / "other.pt", {"a": torch.ones(2)}), mine, is_strict=False)


def test_a_cast_is_said(tmp_path: Path) -> None:
    theirs, mine = model(), model()
    path = write(
        tmp_path / "weights.pt", {name: value.half() if value.is_floating_point() else value for name, value in theirs.state_dict().items()}
    )
    said = load(path, mine)
    assert "cast           0.weight (float16 [8, 4] -> float32 [8, 4])" in said[1]
    assert torch.equal(mine[0].weight, theirs[0].weight.half().float())


def test_a_run_and_its_checkpoints_give_their_weights(tmp_path: Path) -> None:
    theirs = components("seed=3")
    for step in (1, 2):
        saved(tmp_path / "checkpoints", step, theirs, {"eval/loss": float(step)})
    for path, step in ((tmp_path, 2), (tmp_path / "checkpoints/best", 1), (tmp_path / "checkpoints/step_00000001", 1)):
        mine = components("seed=4")
        assert f"step_0000000{step}" in load(path, mine.model)[0]
        assert same(mine.model, theirs.model)
    with pytest.raises(UserError, match="no such file or folder"):
        load(tmp_path / "nowhere", theirs.model)


def test_a_file_as_in_torchs_tutorial_is_read(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2, 2)}
    torch.save({"epoch": 5, "model_state_dict": weights, "optimizer_state_dict": {"state": {}}, "loss": 0.4}, tmp_path / "model.pt")
    assert list(read_pickled(tmp_path / "model.pt")) == ["a.weight"]
