"""The weights of a run in files that others read, without code of ours; the file is whole or not there. torch reads our DCP, and we its."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from ddp_train.checkpoint.save import Content, Saver
from ddp_train.cli.export import export as typed
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError
from ddp_train.training.inference.export import DcpFolder, export
from tests.fake_runner import FakeRunner
from tests.unit.cli.test_prepare import prepare_words
from tests.unit.training.finished import finished

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RUNNER = FakeRunner(lambda job: 1)


class Tied(nn.Module):
    """Has what is not one contiguous tensor a name: tied, permuted and empty ones, a buffer, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("nothing", torch.empty(0, 2))
        self.norm = nn.BatchNorm1d(3)


def run_of(folder: Path, model: nn.Module, **parts: Any) -> Path:
    """Make the checkpoint of a model, and what makes its folder a run's."""
    saver = Saver(folder=folder / "checkpoints", world=alone(), config_hash="abc")
    state = model.state_dict()
    shared = {"model": state, "model_versions": state._metadata, "optimizer": {"state": {}}, "state": {}, **parts}  # type: ignore[attr-defined]
    saver.save(Content(step=3, shared=shared, own={}, may_be_infinite=lambda name: False))
    assert saver.finish() is None
    (folder / "config.yaml").write_text("made: by hand")
    return folder


def test_a_safetensors_file_loads_in_two_lines_without_code_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = Tied(), Tied()
    run_of(tmp_path, model)
    assert typed([str(tmp_path)], RUNNER) == 0
    path = tmp_path / "export/model.safetensors"
    assert f'safetensors.torch.load_file("{path}")' in capsys.readouterr().out
    other.load_state_dict(safetensors.torch.load_file(path))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3", "config_sha256": "abc"}


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path, nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    asked: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr("ddp_train.checkpoint.read.torch.empty", lambda *a, **k: asked.append(empty(*a, **k)) or asked[-1])
    export(tmp_path, format="safetensors", to=tmp_path / "out.safetensors")
    assert max(tensor.numel() for tensor in asked if tensor.dtype == torch.float32) == 64


def test_averages_stand_in_for_the_weights_by_all_their_names(tmp_path: Path) -> None:
    model, other = Tied().half(), Tied()
    averages = {name: torch.rand_like(value, dtype=torch.float32) for name, value in model.named_parameters()}
    run_of(tmp_path, model, averages=averages)
    export(tmp_path, format="safetensors", to=tmp_path / "out.safetensors")
    export(tmp_path, format="pt", to=tmp_path / "out.pt")
    for weights in (safetensors.torch.load_file(tmp_path / "out.safetensors"), torch.load(tmp_path / "out.pt", weights_only=True)):
        assert weights["conv.weight"].dtype == torch.float16
        assert torch.equal(weights["conv.weight"], averages["conv.weight"].half())
        assert torch.equal(weights["head.weight"], averages["embedding.weight"].half())
        assert torch.equal(weights["norm.running_mean"], model.norm.running_mean)  # type: ignore[arg-type]
        other.load_state_dict(weights)


def test_a_pt_file_loads_with_weights_only_and_has_the_versions(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    export(run_of(tmp_path, model), format="pt", to=tmp_path / "out.pt")
    weights = torch.load(tmp_path / "out.pt", weights_only=True)
    other.load_state_dict(weights)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in model.state_dict().items())
    assert weights._metadata["norm"] == {"version": 2}


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    run_of(tmp_path, model)
    with pytest.raises(UserError, match=r"cannot hold spectrum[\s\S]*--format=pt"):
        export(tmp_path, format="safetensors", to=tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("*out*"))  # nothing is left


def test_nothing_is_written_over_and_what_is_typed_wrong_is_told(tmp_path: Path) -> None:
    run = str(run_of(tmp_path, nn.Linear(2, 2)))
    (tmp_path / "there.pt").touch()
    for words, said in (
        ([], "no run folder was given"),
        ([run, "--format=safetensor"], r"--format: is 'safetensor'[\s\S]*one of safetensors, pt, "),
        ([run, "--format=pt", f"to={tmp_path}/there.pt"], "nothing is written over"),
        ([run, f"to={tmp_path}/new.pt"], r"--format=pt"),
        ([run, "--to=w.safetensors"], r"--to=w.safetensors is not an option[\s\S]*fix: to=w.safetensors"),
        ([str(tmp_path / "nowhere")], "neither a run folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            typed(words, RUNNER)


def test_a_model_without_save_pretrained_is_refused_for_hf(tmp_path: Path) -> None:
    finished(tmp_path)
    with pytest.raises(UserError, match="ConvNet has no save_pretrained"):
        export(tmp_path, format="hf", to=tmp_path / "out")


@pytest.mark.long
def test_a_program_is_exported_for_any_number_of_samples(tmp_path: Path) -> None:
    parts = finished(tmp_path)
    export(tmp_path, format="torch_export", to=tmp_path / "out.pt2")
    images = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        found = torch.export.load(tmp_path / "out.pt2").module()(images)
        torch.testing.assert_close(found, parts.model.eval()(images))


def test_a_header_with_metadata_is_read_as_before(tmp_path: Path) -> None:
    run_of(tmp_path, nn.Linear(2, 2))
    export(tmp_path, format="safetensors", to=tmp_path / "out.safetensors")
    content = (tmp_path / "out.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header) == ["__metadata__", "weight", "bias"]


def exported(folder: Path, model: nn.Module) -> Path:
    run_of(folder, model)
    assert typed([str(folder), "--format=dcp"], RUNNER) == 0
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
    assert "2 other entries are skipped" in capsys.readouterr().out
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
    assert "runs any code that its writer put there" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert prepare_words([*words, "--unpickle"]) == 2  # it is no metadata
    assert (tmp_path / "ran").exists()
    assert not (tmp_path / "weights.safetensors").exists()


class _Touches:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self._path,))
