"""What an engine is given is the same for every machine that reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_train.errors import EnvironmentRefuses
from ddp_train.launch.job import Job
from ddp_train.launch.source_copy import Code
from ddp_train.launch.spec import Spec
from ddp_train.run_folder.paths import RunFolder
from tests.unit.parts import checked


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    job = Job(config=checked(), run_folder=RunFolder(tmp_path), command=["ddp-train"], overrides=["name=a b"])
    code = Code(folder=str(tmp_path / "launch/code"), hash="0" * 32, roots=("experiments", "."))
    return Spec(job=job, engine="slurm", processes=(2, 3), min_nodes=2, code=code, engine_options={"setup": ["module load cuda"]})


def test_a_machine_reads_what_was_written(spec: Spec) -> None:
    path = spec.write()
    found = Spec.read(path)
    assert path == spec.job.run_folder.spec and path.stat().st_mode & 0o007 == 0
    assert found.hash() == spec.hash() and found.to_json() == spec.to_json()
    assert (found.processes, found.max_nodes, found.code) == ((2, 3), 2, spec.code)
    assert found.job.config == spec.job.config and found.job.run_folder == spec.job.run_folder
    assert found.token == spec.token != replace(spec, token="other").token


def test_whatever_differs_gives_another_hash(spec: Spec) -> None:
    others = [
        replace(spec, processes=(2, 1)),
        replace(spec, min_nodes=1),
        replace(spec, token="other"),
        replace(spec, code=None),
        replace(spec, engine_options={}),
        replace(spec, job=replace(spec.job, overrides=["name=a", "b"])),
    ]
    assert len({each.hash() for each in (spec, *others)}) == len(others) + 1


def test_one_of_an_earlier_start_stays(spec: Spec) -> None:
    for token in ("first", "second", "third"):
        path = replace(spec, token=token).write()
    kept = [json.loads(path.with_name(name).read_text())["token"] for name in ("spec.1.json", "spec.2.json", "spec.json")]
    assert kept == ["first", "second", "third"]


def test_python_imports_from_the_copy_in_the_order_of_its_roots(spec: Spec) -> None:
    assert spec.code is not None
    assert spec.code.python_path() == f"{spec.code.folder}/experiments:{spec.code.folder}"


@pytest.mark.parametrize("content", [None, "{", "{}", '{"job": {}}'])
def test_a_spec_that_cannot_be_read_is_named_and_not_run_again(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EnvironmentRefuses, match=r"spec\.json") as refused:
        Spec.read(path)
    assert refused.value.exit_code == 78


def test_one_that_was_edited_is_refused(spec: Spec) -> None:
    path = spec.write()
    path.write_text(path.read_text().replace('"min_nodes": 2', '"min_nodes": 1'))
    with pytest.raises(EnvironmentRefuses, match="was edited since it was submitted"):
        Spec.read(path)


def test_a_job_that_is_none_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Not later, on a machine that has begun."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(vars(SimpleNamespace(job={"config": {}}, code=None, processes=[1]))))
    with pytest.raises(EnvironmentRefuses):
        Spec.read(path)
