"""Bad numbers in a real run of three ranks: a step is skipped, the run goes back, or it ends and says which rank and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Finished, Project, metrics

pytestmark = pytest.mark.distributed

PARTS = """
import os
from pathlib import Path
import torch
from torch import nn

class Images:
    facts = {"image_shape": (1, 4, 4), "num_classes": 3}
    def __init__(self, num_samples, spoiled=(), factor=float("nan")):
        generator = torch.Generator().manual_seed(1)
        self.inputs, self.targets = torch.randn(num_samples, 1, 4, 4, generator=generator), torch.arange(num_samples) % 3
        for sample in spoiled:
            self.inputs[sample] *= factor
    def __len__(self):
        return len(self.inputs)
    def batch(self, indices):
        return self.inputs[indices], self.targets[indices]

class Normed(nn.Module):
    def __init__(self, image_shape, num_classes, drifts_at=None, breaks_at=float("inf")):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, num_classes)
        self.drifts_at, self.breaks_at, self.calls = drifts_at, breaks_at, 0
    def forward(self, inputs):
        self.calls += 1
        if self.calls == self.drifts_at and os.environ["RANK"] == "1" and not Path("drifted").exists():
            Path("drifted").touch()
            with torch.no_grad():
                self.head.weight[2, 5] += 1e-6
        if self.calls >= self.breaks_at:
            inputs = inputs * float("nan")
        return self.head(self.norm(inputs.flatten(1)) if self.training else inputs.flatten(1))
"""


def start(project: Project, name: str, *overrides: str, ranks: int = 3) -> Finished:
    project.write("parts.py", PARTS)
    without = [f"~data.{key}" for key in ("split", "image_size", "channels", "num_classes", "noise", "seed", "num_samples", "eval")]
    without += [f"~model.{key}" for key in ("width", "depth")]
    return project.run(
        *["model=mlp", *without, "data._target_=parts.Images", "+data.num_samples=120", "model._target_=parts.Normed"],
        *["trainer.global_batch_size=12", "trainer.max_steps=30", "trainer.log_every_steps=3", "optimizer=adamw", "~metrics.tensorboard"],
        *["cluster=cpu", f"cluster.processes_per_node={ranks}", f"hydra.run.dir=outputs/{name}", *overrides],
    )


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_steps_with_a_bad_sample_are_skipped_on_all_ranks_alike_whatever_their_number(project: Project) -> None:
    runs = {}
    for ranks in (1, 3):
        spoiled = ["+data.spoiled=[17]", "health.on_nonfinite=skip", "model._target_=ddp_train.model.mlp.MLP"]
        done = start(project, f"{ranks}", *spoiled, "+model.width=16", "+model.depth=2", ranks=ranks)
        assert done.returncode == 0, done.output
        assert done.stdout.count(" skipped: loss nan, gradient norm nan; its samples: ") == 3  # sample 17, once an epoch
        runs[ranks] = project.folder / "outputs" / f"{ranks}"
    one, three = ([(event["step"], event["sample_ids"]) for event in events(runs[ranks])] for ranks in (1, 3))
    assert one == three
    assert all(17 in ids and len(ids) == 12 for _, ids in one)
    records = {ranks: metrics(run, "train") for ranks, run in runs.items()}
    assert sum(record["skipped_steps"] for record in records[3]) == 3
    assert [record["loss"] for record in records[3]] == pytest.approx([record["loss"] for record in records[1]], rel=1e-5)
    assert records[3][-1]["samples"] == 30 * 12  # skipped steps count


def test_a_run_goes_back_and_on_past_the_bad_batch(project: Project) -> None:
    done = start(project, "rewound", "+data.spoiled=[17]", "health.on_nonfinite=rewind", "checkpoint.every_steps=2")
    assert done.returncode == 0, done.output
    run = project.folder / "outputs" / "rewound"
    found = events(run)
    lost, rewound = found[0], found[1]
    assert (lost["kind"], lost["loss"], rewound["kind"]) == ("nonfinite", "nan", "rewound")
    assert 17 in lost["sample_ids"]
    assert rewound["step"] < lost["step"] <= rewound["from_step"]
    assert f"rewound from step {rewound['from_step']} to step_{rewound['step']:08d}; the data continues after sample" in done.stdout
    jumps = [event for event in found if event["kind"] == "rewound"]
    jumped = sum(12 * (jump["from_step"] - jump["step"]) for jump in jumps)
    records = metrics(run, "train")
    assert [record["step"] for record in records] == list(range(3, 31, 3))  # none twice, none missing
    assert all(record["loss"] is not None for record in records)
    assert records[-1]["samples"] == 30 * 12 + jumped
    assert all(jump["jumped"][0] <= lost["samples"] < jump["jumped"][1] for jump, lost in zip(jumps, found[::2], strict=True))


@pytest.mark.long
def test_ranks_that_step_apart_skip_each_its_own_step_or_go_back_together(project: Project) -> None:
    """A rank that skips is behind in its momentum alone: the others' step counts for the weights of all."""
    apart = ["+data.spoiled=[17]", "strategy=local_sgd", "strategy.every_steps=4", "health.check_replicas_every_steps=5"]
    skipped = start(project, "skipped", *apart, "health.on_nonfinite=skip")
    assert skipped.returncode == 0, skipped.output
    assert skipped.stdout.count(" skipped: loss nan, gradient norm nan; its samples: ") == 3
    rewound = start(project, "rewound", *apart, "health.on_nonfinite=rewind", "checkpoint.every_steps=2")
    assert rewound.returncode == 0, rewound.output
    kinds = [event["kind"] for event in events(project.folder / "outputs" / "rewound")]
    assert kinds[:2] == ["nonfinite", "rewound"]
    for name in ("skipped", "rewound"):
        records = metrics(project.folder / "outputs" / name, "train")
        assert [record["step"] for record in records] == list(range(3, 31, 3))
        assert all(record["loss"] is not None for record in records)


@pytest.mark.long
def test_a_weight_that_drifts_on_one_rank_ends_the_run_and_is_named(project: Project) -> None:
    done = start(
        project,
        "drifted",
        "+model.drifts_at=10",
        "health.check_replicas_every_steps=8",
        "checkpoint.every_steps=3",
        "checkpoint.asynchronous=false",
    )
    assert done.returncode == 1
    # 12 is no multiple of 8: it is found before it can be saved
    assert "a corrupted replica, found after step 12: rank 1 on " in done.output, done.output
    assert "differs from the others in head.weight" in done.output
    assert done.output.count("The run failed: ") == 1, done.output  # though all ranks fail at once
    run = project.folder / "outputs" / "drifted"
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_00000006", "step_00000009"]


@pytest.mark.long
def test_rows_that_drift_apart_between_replicas_end_the_run_and_are_named(project: Project) -> None:
    hsdp = ["strategy=fsdp", "strategy.replicas=2", "health.check_replicas_every_steps=4"]
    fault = ["debug=faults", "debug.faults=[{kind:drift,rank:3,step:5}]"]
    done = start(project, "drifted", *hsdp, *fault, ranks=4)
    assert done.returncode == 1, done.output
    assert "a corrupted replica, found after step 8: the ranks differ in " in done.output, done.output
    assert "(shard 1 of 2), and no majority says which is right" in done.output.replace("\n", " "), done.output
    assert "(shard 0 of 2)" not in done.output
