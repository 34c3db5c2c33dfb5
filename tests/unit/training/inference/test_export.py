"""The weights of a run in files that others read, without code of ours; the file is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from ddp_train.checkpoint.save import Content, Saver
from ddp_train.cli.export import export as typed
from ddp_train.distributed.world import alone
from ddp_train.errors import ConfigError, UserError
from ddp_train.launch.launcher import Launcher
from ddp_train.training.inference.export import export
from tests.unit.training.finished import finished

LAUNCHER = Launcher(run=lambda job: 1, slots=lambda folder, count: [])


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
    saver = Saver(folder / "checkpoints", alone(), config_hash="abc")
    state = model.state_dict()
    shared = {"model": state, "model_versions": state._metadata, "optimizer": {"state": {}}, "state": {}, **parts}  # type: ignore[attr-defined]
    saver.save(Content(step=3, shared=shared, own={}, may_be_infinite=lambda name: False), facts={})
    assert saver.finish() == ""
    (folder / "config.yaml").write_text("made: by hand")
    return folder


def test_a_safetensors_file_loads_in_two_lines_without_code_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = Tied(), Tied()
    run_of(tmp_path, model)
    assert typed([str(tmp_path)], LAUNCHER) == 0
    path = tmp_path / "export/model.safetensors"
    assert f'safetensors.torch.load_file("{path}")' in capsys.readouterr().out
    other.load_state_dict(safetensors.torch.load_file(path))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3", "config_sha256": "abc"}


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path, nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    asked: list[torch.Size] = []
    empty = torch.empty
    monkeypatch.setattr(
        "ddp_train.checkpoint.read.torch.empty",
        lambda *a, **k: asked.append(torch.Size([a[0]] if isinstance(a[0], int) else a[0])) or empty(*a, **k),
    )
    export(tmp_path, format="safetensors", to=tmp_path / "out.safetensors")
    assert max(shape.numel() for shape in asked if len(shape) == 2) == 64


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
        ([run, "--format=safetensor"], r"--format=safetensors"),
        ([run, "--format=pt", f"to={tmp_path}/there.pt"], "nothing is written over"),
        ([run, f"to={tmp_path}/new.pt"], r"--format=pt"),
        ([run, "--to=w.safetensors"], r"--to=w.safetensors is no option[\s\S]*fix: to=w.safetensors"),
        ([str(tmp_path / "nowhere")], "no run folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            typed(words, LAUNCHER)


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
