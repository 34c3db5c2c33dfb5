"""Interpolations become values, but for secrets and the names of objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_train.config.resolve import resolve
from ddp_train.config.targets.target import name_in
from ddp_train.errors import ConfigError
from ddp_train.training.instantiate import instantiate
from tests.config.test_config import command_line


class Typed(nn.Module):
    def __init__(self, dtype: torch.dtype, act: type[nn.Module], parts: list[type[nn.Module]], loss: nn.Module | None = None) -> None:
        super().__init__()
        self.got = dtype, act, parts


NODE = {
    "_target_": f"{__name__}.Typed",
    "dtype": "${object:torch.float16}",
    "act": "${object:torch.nn.GELU}",
    "parts": ["${object:torch.nn.ReLU}", "${object:torch.nn.Tanh}"],
}


def test_objects_are_named_in_a_config_and_had_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "8")
    errors: list[ConfigError] = []
    composed = OmegaConf.create({"model": NODE, "width": "${oc.env:WIDTH}", "again": "${model.act}"})
    tree = resolve(composed, errors)
    assert (tree["model"], tree["width"], tree["again"], errors) == (NODE, "8", "${object:torch.nn.GELU}", [])
    assert resolve(OmegaConf.create(tree), errors) == tree  # as a saved one is read again
    assert instantiate(NODE, key="model").got == (torch.float16, nn.GELU, [nn.ReLU, nn.Tanh])
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
