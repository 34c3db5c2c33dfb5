"""Data, its order and its meaning between save and resume, and between a run and its evaluation, as users meet them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import Project

TEXT = "the quick brown fox jumps over the lazy dog, and again\n"
RUN = [
    *("data=char_text", "data.path=text.txt", "data.context_length=16", "objective=language_modeling", "model=gpt", "model.width=16"),
    *("model.num_layers=1", "model.num_heads=2", "cluster=cpu", "cluster.processes_per_node=1", "loader.micro_batch_size=8"),
    *("trainer.max_steps=4", "~metrics.tensorboard", "hydra.run.dir=outputs/run"),
]


@pytest.mark.distributed
def test_a_run_goes_on_and_is_evaluated_with_its_own_data_only(project: Project) -> None:
    text = project.folder / "text.txt"
    text.write_text(TEXT * 12)
    assert project.run(*RUN).returncode == 0
    other = project.folder / "other.txt"
    other.write_text((TEXT * 12).replace("z", "\x01"))
    evaluated = project.run("evaluate", "outputs/run", "data.path=other.txt")
    assert evaluated.returncode == 2 and "'\\x01'" in evaluated.output, evaluated.output
    text.write_text(TEXT * 8)  # shorter, and every character is there
    refused = project.run("resume", "outputs/run", "trainer.max_steps=6", "trainer.global_batch_size=12", "seed=1")
    assert refused.returncode == 2, refused.output
    assert "\nseed: 0\n" in (project.folder / "outputs/run/config.yaml").read_text()  # what was refused is not the run's
    for line in ("data.samples: 578 -> 380", "data.bytes: 660 -> 440", "seed: 0 -> 1", "trainer.global_batch_size: 8 -> 12"):
        assert line in refused.output, refused.output
    assert "fix: seed=0 trainer.global_batch_size=8; or" in refused.output, refused.output
    (accept,) = set(re.findall(r"accept_changed_data=\w+", refused.output))
    went_on = project.run("resume", "outputs/run", "trainer.max_steps=6", "trainer.global_batch_size=12", "seed=1", accept)
    assert went_on.returncode == 0 and "seed: 0 -> 1" in went_on.output, went_on.output
    events = [json.loads(line) for line in (project.folder / "outputs/run/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events] == [("data_changed", 4)]
    assert project.run("resume", "outputs/run", "trainer.max_steps=7").returncode == 0  # what was accepted is the run's own now


@pytest.mark.distributed
def test_a_checkpoint_of_another_run_in_the_folder_is_named_and_passed_over(project: Project) -> None:
    (project.folder / "text.txt").write_text(TEXT * 12)
    assert project.run(*RUN).returncode == 0
    assert project.run(*RUN[:-1], "hydra.run.dir=outputs/other", "trainer.max_steps=6").returncode == 0
    ours: Path = project.folder / "outputs/run/checkpoints"
    shutil.copytree(project.folder / "outputs/other/checkpoints/step_00000006", ours / "step_00000006")
    moved = project.folder / "outputs/moved"
    (project.folder / "outputs/run").rename(moved)  # its number travels with it
    went_on = project.run("resume", "outputs/moved", "trainer.max_steps=5")
    assert went_on.returncode == 0, went_on.output
    assert "checkpoint step_00000006 is not used: it is of another run" in went_on.output, went_on.output
    assert "aside_0_step_00000006" in went_on.output and (moved / "checkpoints/step_00000005").is_dir()
