"""An iterable dataset of others in a real run: stopped and resumed, on the same number of ranks and on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Project, metrics

pytestmark = pytest.mark.distributed

DATA = """# @package _global_
data:
  _target_: datasets.load_dataset
  path: json
  data_files: train_*.jsonl
  split: train
  streaming: true
  eval:
    data_files: eval.jsonl
loader:
  fields: [inputs, target]
  micro_batch_size: 4
  num_workers: 1
evaluation:
  batch_size: 8
"""

MODEL = """
_target_: torch.nn.Linear
in_features: 2
out_features: 1
"""

OBJECTIVE = "_target_: torch.nn.MSELoss\n"


def write_lines(project: Project, name: str, numbers: range) -> None:
    lines = [json.dumps({"inputs": [number % 7 / 7, number % 5 / 5], "target": [number % 3 / 3], "note": "unused"}) for number in numbers]
    project.write(name, "\n".join(lines) + "\n")


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(record["split"], record["step"], record["loss"]) for record in metrics(run)]


def test_a_hugging_face_stream_is_resumed_bitwise_and_another_number_of_ranks_is_warned(project: Project) -> None:
    pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    for number in range(4):
        write_lines(project, f"train_{number}.jsonl", range(number * 30, number * 30 + 30))
    write_lines(project, "eval.jsonl", range(200, 211))
    project.write("my_conf/data/lines.yaml", DATA)
    project.write("my_conf/model/line.yaml", MODEL)
    project.write("my_conf/objective/mse.yaml", OBJECTIVE)
    command = ["--config-dir=my_conf", "data=lines", "model=line", "objective=mse", "~metrics.tensorboard", "cluster=cpu"]
    command += ["cluster.processes_per_node=2", "trainer.global_batch_size=15", "trainer.log_every_steps=1", "checkpoint.every_steps=7"]
    command += ["checkpoint.keep_last=9"]
    env = {"HF_HOME": str(project.folder / "hugging_face"), "HF_HUB_OFFLINE": "1"}

    command += ["trainer.max_steps=20", "evaluation.every_steps=10"]
    whole = project.run(*command, "hydra.run.dir=outputs/whole", env=env)
    assert whole.returncode == 0, whole.output
    assert "steps    20 (the data has no epochs)" in whole.stdout
    run = project.folder / "outputs/whole"
    assert json.loads((run / "result.json").read_text())["epoch"] is None
    expected = losses(run)

    for name, ranks in (("same", 2), ("fewer", 1)):
        copied = project.folder / "outputs" / name
        shutil.copytree(run, copied)
        (copied / "result.json").unlink()
        for later in ("step_00000010", "step_00000014", "step_00000020"):
            shutil.rmtree(copied / "checkpoints" / later)
        resumed = project.run("resume", f"outputs/{name}", f"cluster.processes_per_node={ranks}", env=env)
        assert resumed.returncode == 0, resumed.output
        assert "resumed  after step 7" in resumed.stdout
        assert ("the stream starts over" in resumed.stdout) == (ranks == 1)
        found = losses(copied)
        assert [place[:2] for place in found] == [place[:2] for place in expected]
        assert (found == expected) == (ranks == 2)
