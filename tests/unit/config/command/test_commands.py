"""The table of commands, and which of them come to start ranks."""

from __future__ import annotations

import re

import pytest
import yaml

from ddp_train import CONF
from ddp_train.config.command.commands import COMMANDS, starts_ranks


def test_the_help_names_each_command_but_the_one_that_engines_start() -> None:
    text = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]["help"]["template"]
    assert {*re.findall(r"^  ddp-train ([a-z]+) ", text, flags=re.MULTILINE)} == {*COMMANDS} - {"node"}


@pytest.mark.parametrize(
    "words",
    [
        "",
        "model=mlp",
        "-m seed=1,2",
        "++trainer.max_steps=3",
        "~model.width",
        "resume outputs/mnist/1",
        "evaluate RUN",
        "cluster=cpu",
        "cluster.processes_per_node=3",
    ],
)
def test_training_here_is_expected(words: str) -> None:
    assert starts_ranks(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "plan",
        "runs",
        "node SPEC",
        "--help",
        "model=mlp --cfg job",
        "--version",
        "resume --help",
        "cluster=slurm",
        "-m cluster=cpu,local",
        "cluster.launcher=ssh",
    ],
)
def test_what_shows_text_or_goes_to_other_machines_begins_no_import(words: str) -> None:
    assert not starts_ranks(words.split())
