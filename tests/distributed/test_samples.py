"""Which samples each step trains on: the same, whatever the processes, the workers and the stops."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Project, metrics
from tests.distributed.test_exactness import losses

pytestmark = pytest.mark.distributed

RECORDING = """
import json, os, signal
import numpy as np, torch
from torch import nn

pending, taken = [], 0

class Numbers:  # sample i is the number i, and says nothing about its class
    facts = {"num_classes": 3}

    def __len__(self):
        return 1003

    def batch(self, indices):
        return torch.from_numpy(indices.astype(np.float32))[:, None], torch.from_numpy(indices % 3)

class Model(nn.Linear):
    def forward(self, numbers):
        if self.training:
            pending.extend(numbers[:, 0].int().tolist())
        return super().forward(numbers / 1003)

class Recording(torch.optim.SGD):
    def step(self, closure=None):
        global taken
        taken += 1
        with open(f"{os.environ['ATTEMPT']}_{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(pending) + "\\n")
        if os.environ["RANK"] == "0" and taken == int(os.environ.get("STOP_AFTER", 0)):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        pending.clear()  # also of what only settles DDP's buckets when a run is resumed
        super().zero_grad(set_to_none)
"""


def global_batches(folder: Path, attempt: str) -> list[list[int]]:
    """Return the samples of each step, the ranks' shares joined in the order of the ranks."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob(f"{attempt}_*.jsonl"))]
    return [list(chain(*shares)) for shares in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_sizes", [(3, 2), pytest.param((4, 2, 3, 4, 1, 2), marks=pytest.mark.long)])
def test_stopped_and_resumed_on_other_numbers_of_ranks_it_sees_the_same_samples(project: Project, world_sizes: tuple[int, ...]) -> None:
    project.write("recording.py", RECORDING)
    project.write("conf/data/numbers.yaml", "_target_: recording.Numbers\neval: null\n")
    project.write("conf/model/linear.yaml", "_target_: recording.Model\nin_features: 1\nout_features: 3\n")
    project.write("conf/optimizer/recording.yaml", "_target_: recording.Recording\n_partial_: true\nlr: 0.1\n")
    command = [
        "--config-dir=conf",
        "data=numbers",
        "model=linear",
        "optimizer=recording",
        "cluster=cpu",
        "trainer.global_batch_size=96",
        "loader.micro_batch_size=16",
    ]
    command += ["trainer.max_steps=40", "trainer.max_epochs=null", "trainer.log_every_steps=1", "~metrics.tensorboard"]
    command += ["sanity_check=false"]  # which is forward, too

    def run(name: str, *, world_size: int, attempt: str, stop_after: int = 0, workers: int = 2) -> None:
        where = [f"hydra.run.dir=outputs/{name}", f"cluster.processes_per_node={world_size}", f"loader.num_workers={workers}"]
        done = project.run(*command, *where, env={"ATTEMPT": attempt, "STOP_AFTER": str(stop_after)})
        assert done.returncode == (75 if stop_after else 0), done.output

    run("alone", world_size=1, attempt="alone", workers=0)
    alone = global_batches(project.folder, "alone")
    assert [len(batch) for batch in alone[:11]] == [96] * 10 + [43]
    assert sorted(chain(*alone[:11])) == list(range(1003))

    numbers = random.Random(4)
    stops = [numbers.randint(1, 9) for _ in world_sizes[1:]]
    for attempt, (world_size, stop_after) in enumerate(zip(world_sizes, [*stops, 0], strict=True)):
        run("stopped", world_size=world_size, attempt=f"stopped_{attempt}", stop_after=stop_after)
    parts = [global_batches(project.folder, f"stopped_{attempt}") for attempt in range(len(world_sizes))]
    assert all(parts)
    assert list(chain(*parts)) == alone
    whole, stopped = (losses(project.folder / "outputs" / name) for name in ("alone", "stopped"))
    assert [step for step, _ in stopped] == [step for step, _ in whole]
    assert [loss for _, loss in stopped] == pytest.approx([loss for _, loss in whole], rel=1e-5)


@pytest.mark.long
def test_bad_images_are_skipped_alike_on_every_number_of_ranks(project: Project) -> None:
    for split in ("train", "eval"):
        for number in range(40):
            path = project.folder / f"images/{split}/class_{number % 2}/{number:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number * 6, 100, 255 - number * 6)).save(path)
            if number in (7, 20, 21):
                path.write_bytes(path.read_bytes()[:30])
    command = ["data=image_folder", "data.root=images", "data.eval.split=eval", "model=mlp", "model.width=8", "loader.micro_batch_size=4"]
    command += ["trainer.global_batch_size=12", "trainer.max_epochs=2", "trainer.log_every_steps=3", "~metrics.tensorboard", "cluster=cpu"]
    for world_size in (1, 2):
        where = [f"hydra.run.dir=outputs/{world_size}", f"cluster.processes_per_node={world_size}", f"loader.num_workers={world_size - 1}"]
        done = project.run(*command, "loader.on_bad_sample=skip", *where)
        assert done.returncode == 0, done.output
    alone, together = (metrics(project.folder / "outputs" / name) for name in ("1", "2"))
    assert [record["skipped_samples"] for record in together] == [record["skipped_samples"] for record in alone]
    assert sum(record["skipped_samples"] for record in alone if record["split"] == "train") == 2 * 3
    assert {record["skipped_samples"] for record in alone if record["split"] == "eval"} == {3}
    assert [record["loss"] for record in together] == pytest.approx([record["loss"] for record in alone], rel=1e-5)
    assert [record.get("accuracy") for record in together] == [record.get("accuracy") for record in alone]
    assert "is skipped: DataError (images/train/class_1/07.png): " in (project.folder / "outputs/1/logs/rank_00000.log").read_text()
