"""Interpolations become values, but for secrets and the names of objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_train.config.resolve import resolve
from ddp_train.config.targets.target import declares, name_in
from ddp_train.training.instantiate import instantiate
from tests.config.test_config import command_line


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype, act: type[nn.Module], parts: list[type[nn.Module]], loss: nn.Module | None = None) -> None:
        super().__init__()
        self.got = dtype, act, parts


MODEL = {
    "_target_": f"{__name__}.Typed",
    "dtype": "${object:torch.float16}",
    "act": "${object:torch.nn.GELU}",
    "parts": ["${object:torch.nn.ReLU}", "${object:torch.nn.Tanh}"],
}


def test_objects_are_named_in_a_config_and_had_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "8")
    composed = OmegaConf.create({"model": MODEL, "width": "${oc.env:WIDTH}", "again": "${model.act}"})
    tree, errors = resolve(composed)
    assert (tree["model"], tree["width"], tree["again"], errors) == (MODEL, "8", "${object:torch.nn.GELU}", [])
    assert resolve(OmegaConf.create(tree)) == (tree, [])  # as a saved one is read again
    assert instantiate(MODEL, key="model").got == (torch.float16, nn.GELU, [nn.ReLU, nn.Tanh])
    assert name_in("text") is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${object:os.system}", "model.dtype: os.system is posix.system"),
        ("${object:torch.float33}", "model.dtype: cannot import torch.float33"),
        ("x${object:torch.float32}", "an object cannot be part of a text"),
    ],
)
def test_names_of_tools_and_of_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, said: str
) -> None:
    own = [f"model._target_={__name__}.Typed", "+model.act=${object:torch.nn.GELU}", "+model.parts=[]"]
    assert command_line(monkeypatch, tmp_path, *own, f"+model.dtype={value}") == (2, [])
    assert said in capsys.readouterr().err


HERE = __name__


class MyModel(nn.Module):
    def __init__(self, num_classes: int, width: str = "wide", depth: int = 1) -> None:
        super().__init__()


class Passing(MyModel):
    def __init__(self, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class MyData:
    def __init__(self, size: int = 8, train: bool = True) -> None: ...
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Counted(MyData):
    def __init__(self, num_samples: int = 8, train: bool = True) -> None: ...


def my_loss(outputs: Any, targets: Any) -> Any: ...


def tree_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    code, jobs = command_line(monkeypatch, folder, "cluster=cpu", *overrides)
    assert code == 0
    return jobs[0].config.tree, jobs[0].config.left_out


def test_what_another_class_does_not_take_by_name_and_type_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree, lines = tree_of(monkeypatch, tmp_path, f"model._target_={HERE}.MyModel", "+model.depth=3")
    assert tree["model"] == {"_target_": f"{HERE}.MyModel", "num_classes": "auto", "depth": 3}  # width: 32 is no text
    told = f"model    {HERE}.MyModel instead of ConvNet: takes num_classes=auto of its arguments, not image_shape, width, dropout"
    assert lines == [told]


def test_what_was_typed_is_never_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(monkeypatch, tmp_path, f"model._target_={HERE}.MyModel", "model.dropout=0.0") == (2, [])
    assert "model.dropout: " in capsys.readouterr().err
    (tmp_path / "mine/experiment").mkdir(parents=True)
    own = f"# @package _global_\nmodel:\n  _target_: {HERE}.MyModel\n  dropout: 0.3\n"
    (tmp_path / "mine/experiment/own.yaml").write_text(own)
    assert command_line(monkeypatch, tmp_path, "--config-dir=mine", "experiment=own") == (2, [])
    assert "model.dropout: " in capsys.readouterr().err


def test_an_option_that_is_based_on_another_one_is_known_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/wide.yaml").write_text("defaults: [mlp]\nwidth: 999\n")
    tree, _ = tree_of(monkeypatch, tmp_path, "--config-dir=mine", "model=wide", f"model._target_={HERE}.MyModel")
    assert tree["model"] == {"_target_": f"{HERE}.MyModel", "num_classes": "auto", "depth": 3}  # of mlp, which has a depth


def test_splits_that_nothing_tells_apart_are_not_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree, (line,) = tree_of(monkeypatch, tmp_path, f"data._target_={HERE}.MyData")
    assert tree["data"] == {"_target_": f"{HERE}.MyData", "eval": None}
    assert "no evaluation" in line
    tree, _ = tree_of(monkeypatch, tmp_path, f"data._target_={HERE}.MyData", "+data.eval.train=false")
    assert tree["data"]["eval"] == {"train": False}
    tree, (line,) = tree_of(monkeypatch, tmp_path, f"data._target_={HERE}.Counted")  # it takes num_samples, and no split
    assert tree["data"]["eval"] is None and "no evaluation" in line
    tree, _ = tree_of(monkeypatch, tmp_path, f"data._target_={HERE}.Counted", "+data.eval.train=false")
    assert tree["data"]["eval"] == {"num_samples": 2000, "train": False}
    (tmp_path / "mine/experiment").mkdir(parents=True)
    own = f"# @package _global_\ndata:\n  _target_: {HERE}.MyData\n  eval: {{train: false}}\n"
    (tmp_path / "mine/experiment/own.yaml").write_text(own)
    tree, (line,) = tree_of(monkeypatch, tmp_path, "--config-dir=mine", "experiment=own")
    assert tree["data"]["eval"] == {"train": False} and "no evaluation" not in line


def test_custom_options_hold_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {
        "model": f"{HERE}.MyModel",
        "data": f"{HERE}.MyData",
        "objective": f"{HERE}.my_loss",
        "optimizer": "torch.optim.Adam",
        "scheduler": "torch.optim.lr_scheduler.ExponentialLR",
    }
    chosen = [f"{group}=custom" for group in targets]
    typed = [f"{group}._target_={path}" for group, path in targets.items()]
    tree, lines = tree_of(monkeypatch, tmp_path, *chosen, *typed, "+model.num_classes=2", "+scheduler.gamma=0.9")
    assert lines == []
    assert tree["optimizer"] == {"_target_": "torch.optim.Adam", "_partial_": True}  # which the slot knows
    assert tree["objective"] == {"_target_": f"{HERE}.my_loss", "_partial_": True}
    assert tree["data"] == {"_target_": f"{HERE}.MyData", "eval": None}
    assert command_line(monkeypatch, tmp_path, "model=custom") == (2, [])
    said = capsys.readouterr().err
    assert "model._target_: has no value yet (???)\n  fix: model._target_=my_package.MyClass" in said
    assert command_line(monkeypatch, tmp_path, "data=custom") == (2, [])
    assert capsys.readouterr().err.count("data._target_: ") == 1


def test_a_class_that_passes_arguments_on_takes_those_of_its_bases() -> None:
    assert declares(Passing, "extra") and declares(Passing, "depth")
    assert not declares(Passing, "dropout")
    assert not declares(lambda **kwargs: None, "num_classes")
