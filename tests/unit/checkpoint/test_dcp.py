"""Folders of torch.distributed.checkpoint: torch reads ours, and we theirs; unpickled only when that is asked for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from ddp_train.checkpoint.dcp import DcpFolder
from ddp_train.cli.export import export as typed_export
from ddp_train.errors import UserError
from tests.unit.cli.test_prepare import prepare_words
from tests.unit.training.inference.test_export import LAUNCHER, Tied, run_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def exported(folder: Path, model: nn.Module) -> Path:
    run_of(folder, model)
    assert typed_export([str(folder), "--format=dcp"], LAUNCHER) == 0
    return folder / "export/model"


def test_torch_reads_what_is_exported(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    folder = exported(tmp_path, model)
    state = {"model": other.state_dict()}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_what_torch_has_written_comes_back_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside other things, which stay where they are."""
    model = Tied().bfloat16()
    state = {"model": model.state_dict(), "optimizer": {"lr": 0.1, "momentum": torch.ones(3)}}
    torch_dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert prepare_words(["weights", str(tmp_path / "theirs"), f"to={tmp_path}/weights.safetensors", "--unpickle"]) == 0
    assert "2 other entries are left" in capsys.readouterr().out
    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_run_goes_to_dcp_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    model = Tied()
    folder = exported(tmp_path, model)
    assert prepare_words(["weights", str(folder), f"to={tmp_path}/weights.safetensors", "--unpickle"]) == 0
    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def cut_into_pieces(folder: Path, whole: Tensor, places: list[tuple[int, int, int, int]]) -> None:
    """Write a matrix as ranks do that have a rectangle of it each: from which row and column on, how many of both."""
    folder.mkdir()
    chunks, results = [], []
    for number, (row, column, height, width) in enumerate(places):
        torch.save(whole[row : row + height, column : column + width].clone(), folder / f"__{number}_0.distcp")
        chunk = ChunkStorageMetadata(torch.Size([row, column]), torch.Size([height, width]))
        size = (folder / f"__{number}_0.distcp").stat().st_size
        results.append(WriteResult(MetadataIndex("w", chunk.offsets, number), size, _StorageInfo(f"__{number}_0.distcp", 0, size)))
        chunks.append(chunk)
    described: Any = {"w": TensorStorageMetadata(TensorProperties(whole.dtype), whole.shape, chunks)}
    FileSystemWriter(folder).finish(Metadata(described), [results])


def test_a_tensor_is_put_together_from_the_pieces_of_the_ranks(tmp_path: Path) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    cut_into_pieces(tmp_path / "all", whole, [(0, 0, 3, 7), (3, 0, 2, 4), (3, 4, 2, 3)])
    assert torch.equal(DcpFolder(tmp_path / "all").read("w"), whole)
    cut_into_pieces(tmp_path / "some", whole, [(0, 0, 3, 7), (3, 0, 2, 4)])
    with pytest.raises(UserError, match="6 numbers of w are in no file"):
        DcpFolder(tmp_path / "some")


def test_nothing_is_unpickled_unless_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/.metadata").write_bytes(pickle.dumps(_Touches(tmp_path / "ran")))
    words = ["weights", str(tmp_path / "theirs"), f"to={tmp_path}/weights.safetensors"]
    assert prepare_words(words) == 2
    assert "runs whatever its writer has put there" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert prepare_words([*words, "--unpickle"]) == 2  # it is no metadata
    assert (tmp_path / "ran").exists()
    assert not (tmp_path / "weights.safetensors").exists()


class _Touches:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self._path,))
