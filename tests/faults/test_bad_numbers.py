"""Bad numbers together with resumes and restarts: what was jumped over stays jumped over, to the last digit of every record."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project, metrics
from tests.distributed.test_bad_numbers import events, start

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def numbers(run: Path) -> list[dict[str, Any]]:
    """Return all that a run has computed, without what depends on the clock."""
    kept = ("split", "step", "samples", "epoch", "loss", "lr", "grad_norm", "skipped_steps")
    return [{name: record[name] for name in kept if name in record} for record in metrics(run)]


REACTIONS = {
    "rewound": ["+data.spoiled=[17]", "health.on_nonfinite=rewind"],
    "skipped": ["+data.spoiled=[17,40]", "health.on_nonfinite=skip"],
    "spike": ["+data.spoiled=[17]", "+data.factor=1e4", "health.spike_zscore=20", "health.on_spike=rewind"],
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"], indirect=True)
@pytest.mark.parametrize("kind", REACTIONS)
def test_a_run_that_is_resumed_from_any_of_its_checkpoints_ends_the_same(project: Project, kind: str, strategy: str) -> None:
    model = ["model._target_=ddp_train.model.mlp.MLP", "+model.width=16", "+model.depth=2"]  # without norms, which would swallow a spike
    long = ["trainer.max_steps=60", "checkpoint.every_steps=4", "checkpoint.keep_last=100"]
    done = start(project, "whole", *REACTIONS[kind], *model, *long, f"strategy={strategy}")
    assert done.returncode == 0, done.output
    run = project.folder / "outputs" / "whole"
    whole = numbers(run)
    assert kind in [event["kind"] for event in events(run)]
    checkpoints = sorted((run / "checkpoints").glob("step_*"))[:-1]
    seed = random.randrange(1000)
    print(f"seed {seed}")
    for checkpoint in sorted(random.Random(seed).sample(checkpoints, 4), reverse=True):
        again = project.run("resume", str(checkpoint.relative_to(project.folder)))
        assert again.returncode == 0, again.output
        assert numbers(run) == whole, f"resumed from {checkpoint.name}"


def test_a_run_whose_weights_drift_is_started_again_and_equals_one_that_nothing_happened_to(project: Project) -> None:
    drifting = ["+model.drifts_at=10", "health.check_replicas_every_steps=4", "checkpoint.every_steps=3"]
    drifted = start(project, "drifted", *drifting, "cluster.max_restarts=1")
    assert drifted.returncode == 0, drifted.output
    assert "a corrupted replica" in (project.folder / "outputs/drifted/failure.1.json").read_text()
    undisturbed = start(project, "undisturbed", *drifting)  # it drifts once in a folder
    assert undisturbed.returncode == 0, undisturbed.output
    assert numbers(project.folder / "outputs/drifted") == numbers(project.folder / "outputs/undisturbed")


def test_a_run_that_cannot_be_saved_by_going_back_ends_with_a_verdict(project: Project) -> None:
    early = start(project, "early", "+data.spoiled=[17]", "health.on_nonfinite=rewind", "checkpoint.every_steps=100")
    assert early.returncode == 1
    assert "There is no checkpoint to go back to yet" in early.output
    hopeless = start(project, "hopeless", "+model.breaks_at=6", "health.on_nonfinite=rewind", "checkpoint.every_steps=2")
    assert hopeless.returncode == 1
    assert "has failed 3 times" in hopeless.output, hopeless.output
