"""JSON schemas for editors: every YAML of ours passes, and mistakes are marked where they stand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_train import CONF
from ddp_train.cli.init import starter
from ddp_train.cli.schema import schemas, write
from ddp_train.errors import UserError
from tests.fake_runner import FakeRunner

jsonschema = pytest.importorskip("jsonschema", reason="needs a validator: make train installs it")
STARTER = starter() / "conf"
RUNNER: Any = FakeRunner()
FILES = [path for folder in (CONF, STARTER) for path in sorted(folder.rglob("*.yaml")) if "hydra" not in path.relative_to(folder).parts]


@pytest.fixture(scope="module")
def validate() -> Callable[[str, Any], list[str]]:
    """Return the keys at which a validator marks a value, dotted."""
    sys.path.insert(0, str(starter()))
    made = schemas([CONF, STARTER])
    sys.path.remove(str(starter()))

    def marks(name: str, value: Any) -> list[str]:
        errors = jsonschema.Draft7Validator(made[name]).iter_errors(value)
        return sorted(".".join([*map(str, error.absolute_path), *_unknown(error)]) for error in errors)

    for schema in made.values():
        jsonschema.Draft7Validator.check_schema(schema)
    return marks


def _unknown(error: Any) -> list[str]:
    """Return the key that an object may not have."""
    if error.validator != "additionalProperties":
        return []
    return [next(key for key in error.instance if key not in error.schema["properties"])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_yaml_passes_the_schema_of_its_group(path: Path, validate: Callable[[str, Any], list[str]]) -> None:
    text = path.read_text()
    name = "config" if "@package _global_" in text or path.parent in (CONF, STARTER) else path.parent.name
    assert validate(name, yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("trainer", "max_step: 3", "max_step"),
        ("trainer", "max_steps: three", "max_steps"),
        ("trainer", "max_steps: 0", "max_steps"),
        ("trainer", "clip_grad_norm: 0", "clip_grad_norm"),
        ("trainer", "optimizer_in_backward: 1", "optimizer_in_backward"),
        ("checkpoint", "keep_last: -1", "keep_last"),
        ("checkpoint", "asynchronous: 'yes'", "asynchronous"),
        ("precision", "float32_matmul_precision: fast", "float32_matmul_precision"),
        ("health", "on_nonfinite: ignore", "on_nonfinite"),
        ("cluster", "launcher: pbs", "launcher"),
        ("cluster", "slurm: {partitions: gpu}", "slurm.partitions"),
        ("cluster", "slurm: {exclusive: 3}", "slurm.exclusive"),
        ("loader", "num_workers: 1.5", "num_workers"),
        ("loader", "pin_memory: true", "pin_memory"),
        ("model", "_target_: ddp_train.model.mlp.MLP\nhidden: [8]", "hidden"),
        ("model", "_target_: ddp_train.model.convnet.ConvNet\nwidth: wide", "width"),
        ("optimizer", "_target_: torch.optim.SGD\nlearning_rate: 0.1", "learning_rate"),
        ("optimizer", "_target_: torch.optim.SGD\nnesterov: often", "nesterov"),
        ("data", "_target_: my_project.data.Waves\nnum_samples: many", "num_samples"),
        ("data", "_target_: my_project.data.Waves\neval: {samples: 3}", "eval.samples"),
        ("callbacks", "weight_norm: {_target_: my_project.callback.WeightNorm, every: 3}", "weight_norm.every"),
        ("config", "trainer: {max_epoch: 3}", "trainer.max_epoch"),
        ("config", "seeds: 3", "seeds"),
        ("config", "model: {_target_: my_project.model.WaveNet, width: [1]}", "model.width"),
    ],
)
def test_a_mistake_is_marked_at_its_key(name: str, text: str, key: str, validate: Callable[[str, Any], list[str]]) -> None:
    assert validate(name, yaml.safe_load(text)) == [key]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer", "max_steps: ${oc.env:STEPS}"),
        ("trainer", "max_steps: null"),
        ("model", "_target_: a_package.Model\nanything: 3"),
        ("model", "_target_: my_project.model.WaveNet\nnum_classes: auto\nwidth: ${extra.width}"),
        ("optimizer", "_target_: torch.optim.SGD\nlr: 1\ngroups: []"),
        ("data", "_target_: my_project.data.Waves\neval: null"),
        ("callbacks", "ema: null"),
    ],
)
def test_what_is_good_is_not_marked(name: str, text: str, validate: Callable[[str, Any], list[str]]) -> None:
    assert validate(name, yaml.safe_load(text)) == []


def test_the_command_writes_a_file_for_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write([".schema"], RUNNER) == 0
    for name in {path.parent.name for path in STARTER.rglob("*.yaml")} - {"project", "experiment"} | {"config"}:
        assert json.loads((tmp_path / f".schema/{name}.json").read_text())["$schema"]
    with pytest.raises(UserError, match="no folder"):
        write([], RUNNER)


def test_the_starter_names_the_schema_of_each_file() -> None:
    for path in STARTER.rglob("*.yaml"):
        text = path.read_text()
        name = "config" if "@package _global_" in text else path.parent.name
        assert f"# yaml-language-server: $schema=../../.schema/{name}.json" in text.splitlines()[:2]
