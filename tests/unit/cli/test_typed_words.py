"""Which commands come to start ranks on this machine, as far as their words show it; that they do is in tests/distributed/test_run.py."""

from __future__ import annotations

import pytest

from ddp_train.cli.typed_words import starts_ranks


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
