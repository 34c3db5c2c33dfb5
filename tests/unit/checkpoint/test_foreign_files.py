"""Tensors are had from any torch file, and nothing that it names is imported or called."""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_train.checkpoint.foreign_files import read_pickled
from ddp_train.errors import UserError


class Monitor(Enum):
    """What a callback of somebody's compares by."""

    LOSS = "loss"


class Bag(dict[str, Any]):
    """Hyper-parameters, as Lightning keeps them: a class of its own."""


class Payload:
    """Calls something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def weights() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "weight": base,
        "transposed": base.t(),
        "part": base[1:3, 2:4],
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
        "flags": torch.tensor([True, False]),
        "small": torch.tensor([1, -1], dtype=torch.int8),
        "wide": torch.tensor([1, 2], dtype=torch.uint16),
    }


def lightnings(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what a checkpoint of Lightning's holds beside its weights, and more."""
    bag = Bag(width=3)
    bag.root = pathlib.PurePosixPath("/data")  # type: ignore[attr-defined]
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": OrderedDict(state),
        "callbacks": {"ModelCheckpoint": {"best": torch.tensor(0.5), "mode": Monitor.LOSS}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}],
        "hyper_parameters": bag,
        "loss": nn.CrossEntropyLoss(),
        "partial": functools.partial(int, base=2),
        "others": [deque([1]), defaultdict(list, a=[1]), {1, 2}, slice(1, 2), 1j],
    }


def test_weights_come_back_whatever_stands_beside_them(tmp_path: Path) -> None:
    torch.save(lightnings(weights()), tmp_path / "theirs.ckpt")
    found = read_pickled(tmp_path / "theirs.ckpt")
    assert found.keys() == weights().keys()
    for name, value in weights().items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    assert found["weight"].data_ptr() == found["transposed"].data_ptr()  # tied weights stay so


def test_nothing_that_a_file_names_is_called(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    state = lightnings(weights())
    state["hyper_parameters"] = [Payload(os.mkdir, str(marker)), Payload(eval, f"open({str(marker)!r}, 'w')")]
    torch.save(state, tmp_path / "bad.ckpt")
    assert "weight" in read_pickled(tmp_path / "bad.ckpt")
    assert not marker.exists()
    torch.save({"state_dict": {"weight": Payload(os.mkdir, str(marker))}}, tmp_path / "worse.ckpt")
    with pytest.raises(UserError, match="objects that are not tensors: weight"):
        read_pickled(tmp_path / "worse.ckpt")
    assert not marker.exists()


def change(path: Path, edit: Callable[[dict[str, bytes]], None]) -> Path:
    """Write an archive again with other entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    edit(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def _shorten(entries: dict[str, bytes]) -> None:
    name = next(name for name in entries if name.endswith("/data/0"))
    entries[name] = entries[name][:8]


def _lack(entries: dict[str, bytes]) -> None:
    del entries[next(name for name in entries if name.endswith("/data/0"))]


def _cut(entries: dict[str, bytes]) -> None:
    name = next(name for name in entries if name.endswith("data.pkl"))
    entries[name] = entries[name][:-20]


def _no_dict(entries: dict[str, bytes]) -> None:
    entries[next(name for name in entries if name.endswith("data.pkl"))] = pickle.dumps([1, 2])


def _big_endian(entries: dict[str, bytes]) -> None:
    entries[next(name for name in entries if name.endswith("byteorder"))] = b"big"


@pytest.mark.parametrize("edit", [_shorten, _lack, _cut, _no_dict, _big_endian])
def test_a_damaged_file_is_refused(tmp_path: Path, edit: Callable[[dict[str, bytes]], None]) -> None:
    torch.save({"state_dict": weights()}, tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match=r"is damaged: |fit its values|holds a list|byte order"):
        read_pickled(change(tmp_path / "weights.ckpt", edit))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("weights")
    with pytest.raises(UserError, match="not a zip archive"):
        read_pickled(tmp_path / "text.ckpt")
